"""Encoders over HTTP, from the engine of a real server."""

import json
import shlex
from pathlib import Path

import httpx
import numpy as np
import pytest

from mlx_server.models.tokenizer import Tokenizer
from tests.live.common import Models, common_models, folder_of
from tests.live.server import LiveServer, eventually
from tests.tiny_encoders import (
    BERT,
    CLS,
    MODERN,
    POSITIONS,
    SEP,
    XLM_R,
    Weights,
    hidden_states,
    pooled,
    ranking,
    score,
    tiny_encoder,
    weights_of,
)

EMBEDDERS = {"bge": (BERT, "cls_token"), "e5": (XLM_R, "mean_tokens"), "gte": (MODERN, "cls_token")}
RANKER = "bge-reranker"
TRAINED = POSITIONS - 10
"""The longest input of one of the models."""
TEXTS = ["salü", "a longer text. " * 4, "x", "what?"]


@pytest.fixture(scope="module")
def weights() -> dict[str, Weights]:
    configs = {name: config for name, (config, _) in EMBEDDERS.items()}
    return {
        name: dict(weights_of(config))
        for name, config in {**configs, RANKER: ranking(XLM_R)}.items()
    }


@common_models
def models(folder: Path, _: object) -> Models:
    for name, (config, pooling) in EMBEDDERS.items():
        tiny_encoder(folder / name, config, pooling=pooling)
    (folder / "bge" / "sentence_bert_config.json").write_text(f'{{"max_seq_length": {TRAINED}}}')
    tiny_encoder(folder / RANKER, ranking(XLM_R))
    return {name: {"source": name} for name in (*EMBEDDERS, RANKER)}


@pytest.fixture(scope="module")
def tokenizer(server: LiveServer) -> Tokenizer:
    return Tokenizer(folder_of(server, __name__) / "bge" / "tokenizer.json")


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_as_the_files_pool_them(
    http: httpx.Client, weights: dict[str, Weights], tokenizer: Tokenizer, name: str
) -> None:
    found = http.post("/v1/embeddings", json={"model": name, "input": TEXTS}).json()
    config, pooling = EMBEDDERS[name]
    ids = [[CLS, *tokenizer.encode(text), SEP] for text in TEXTS]
    assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
    for each, text in zip(found["data"], ids, strict=True):
        exact = pooled(hidden_states(config, weights[name], text), pooling.split("_")[0])
        np.testing.assert_allclose(each["embedding"], exact, atol=2e-5)


def test_ranks(http: httpx.Client, weights: dict[str, Weights], tokenizer: Tokenizer) -> None:
    body = {"model": RANKER, "query": "who?", "documents": TEXTS}
    found = http.post("/v1/rerank", json=body).json()
    scores = {each["index"]: each["relevance_score"] for each in found["results"]}
    for place, text in enumerate(TEXTS):
        ids = [CLS, *tokenizer.encode("who?"), SEP, *tokenizer.encode(text), SEP]
        hidden = hidden_states(XLM_R, weights[RANKER], ids)
        assert scores[place] == pytest.approx(score(XLM_R, weights[RANKER], hidden), abs=2e-5)
    order = [each["relevance_score"] for each in found["results"]]
    assert order == sorted(order, reverse=True)


def test_one_that_is_ready_is_announced_with_a_request(
    server: LiveServer, http: httpx.Client
) -> None:
    http.post("/v1/rerank", json={"model": RANKER, "query": "q", "documents": ["d"]})
    ready = f"{RANKER} is ready"
    eventually(lambda: any(line.startswith(ready) for line in server.printed), "it is announced")
    line = next(line for line in server.printed if line.startswith(ready))
    program, url, option, body = shlex.split(line.partition("try: ")[2])
    assert (program, option) == ("curl", "--json")
    assert httpx.post(url, json=json.loads(body)).json()["model"] == RANKER
