"""Ranks over HTTP, from the engine of a real server."""

import json
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.models.llama import Model, ModelArgs

from mlx_server.models.tokenizer import Tokenizer
from tests.generation.test_rerank import PROMPT, WEB
from tests.live.common import Models, common_models, folder_of
from tests.live.server import LiveServer
from tests.tiny import tiny_embedder, tiny_reranker

RANKS, EMBEDS, CHATS, UNFIT = "ranks", "does-not-rank", "chats-only", "unfit"
PATH = "/v1/rerank"
QUERY = "Wie heißt sie? 🙂"
DOCUMENTS = ["Salü", "", "A longer text, of more tokens than the others have. " * 4, "y", "Salü"]

Json = dict[str, Any]


@common_models
def models(folder: Path, _: object) -> Models:
    tiny_reranker(folder / RANKS)
    tiny_embedder(folder / EMBEDS)
    return {
        RANKS: {"source": RANKS},
        EMBEDS: {"source": EMBEDS},
        CHATS: {"source": RANKS, "task": "generate"},
        UNFIT: {"source": EMBEDS, "task": "rerank"},
    }


@pytest.fixture(scope="module")
def folder(server: LiveServer) -> Path:
    return folder_of(server, __name__)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder / RANKS / "tokenizer.json")


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    model = Model(ModelArgs.from_dict(json.loads((folder / RANKS / "config.json").read_text())))
    weights: Any = mx.load(str(folder / RANKS / "model.safetensors"))
    model.update(tree_unflatten(list(weights.items())))
    return model


def ranked(http: httpx.Client, **asked: Any) -> Json:
    body = {"model": RANKS, "query": QUERY, "documents": DOCUMENTS, **asked}
    response = http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


def scores(found: Json) -> dict[int, float]:
    return {each["index"]: each["relevance_score"] for each in found["results"]}


@pytest.mark.parametrize("instruction", [None, "Find names."])
def test_the_scores_are_those_of_a_plain_computation(
    http: httpx.Client, network: Any, tokenizer: Tokenizer, instruction: str | None
) -> None:
    found = ranked(http, instruction=instruction)
    assert (found["model"], found["id"][:7]) == (RANKS, "rerank-")
    prompts = [
        tokenizer.encode(PROMPT.format(instruct=instruction or WEB, query=QUERY, document=each))
        for each in DOCUMENTS
    ]
    total = sum(map(len, prompts))
    assert found["usage"] == {"prompt_tokens": total, "total_tokens": total}
    answers = [id for each in "ny" if (id := tokenizer.id_of(each)) is not None]
    for index, prompt in enumerate(prompts):
        no, yes = np.exp(np.array(network(mx.array([prompt]))[0, -1], dtype=np.float64)[answers])
        assert scores(found)[index] == pytest.approx(yes / (yes + no), abs=2e-4)
    assert len({round(each, 3) for each in scores(found).values()}) > 2, "they differ"


@pytest.mark.parametrize(
    ("model", "route"), [(EMBEDS, "/v1/embeddings"), (CHATS, "/v1/chat/completions")]
)
def test_another_model_is_told_where_to_go(http: httpx.Client, model: str, route: str) -> None:
    response = http.post(PATH, json={"model": model, "query": "q", "documents": ["x"]})
    assert response.status_code == 400
    assert route in response.json()["error"]["message"]
