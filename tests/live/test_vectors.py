"""Embeddings and ranks over HTTP, of language models and of encoders, from the engine of a real
server, with the clients of OpenAI and Ollama."""

import base64
import json
import shlex
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import ollama
import pytest
from openai import OpenAI

from mlx_server.models.tokenizer import Tokenizer
from tests.generation.test_rerank import PROMPT, WEB
from tests.live.common import Models, common_models, folder_of
from tests.live.server import LiveServer, eventually
from tests.tiny import tiny_embedder, tiny_reranker
from tests.tiny_encoders import (
    BERT,
    CLS,
    MODERN,
    POSITIONS,
    SEP,
    XLM_R,
    hidden_states,
    pooled,
    ranking,
    score,
    tiny_encoder,
    weights_of,
)
from tests.worker.lora_files import network

EMBEDS, MEAN, CHATS, CONVERTED, RANKS = "embeds", "mean", "chats", "converted", "ranks"
ENCODERS = {"bge": (BERT, "cls_token"), "e5": (XLM_R, "mean_tokens"), "gte": (MODERN, "cls_token")}
RANKER, RANKING = "bge-reranker", ranking(XLM_R)
TRAINED = POSITIONS - 10
"""The longest input of one of the encoders."""
TEXTS = ["salü 🙂", "x", "A longer text, of more tokens than the others have. " * 4, ""]
WORDS = ["salü", "a longer text. " * 4, "x", "what?"]
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"

Json = dict[str, Any]


@common_models
def models(folder: Path, _: object) -> Models:
    tiny_embedder(folder / EMBEDS)
    tiny_embedder(folder / MEAN, pooling="mean_tokens")
    tiny_reranker(folder / RANKS)
    for name, (config, pooling) in ENCODERS.items():
        tiny_encoder(folder / name, config, pooling=pooling)
    (folder / "bge" / "sentence_bert_config.json").write_text(f'{{"max_seq_length": {TRAINED}}}')
    tiny_encoder(folder / RANKER, RANKING)
    own = {name: {"source": name} for name in (EMBEDS, MEAN, RANKS, RANKER, *ENCODERS)}
    others = {CHATS: "generate", CONVERTED: "embed"}
    return own | {name: {"source": RANKS, "task": task} for name, task in others.items()}


@pytest.fixture(scope="module")
def folder(server: LiveServer) -> Path:
    return folder_of(server, __name__)


def tokens(folder: Path, model: str, texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer(folder / model / "tokenizer.json")
    return [tokenizer.encode(text) for text in texts]


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def posted(http: httpx.Client, path: str, status: int = 200, **body: Any) -> Json:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    found: Json = response.json()
    return found


def scores(found: Json) -> list[float]:
    """Of the documents in their order, of which the best come first."""
    ranked = [(each["index"], each["relevance_score"]) for each in found["results"]]
    assert ranked == sorted(ranked, key=lambda each: -each[1])
    return [score for _, score in sorted(ranked)]


@pytest.mark.parametrize("model", [EMBEDS, MEAN, CONVERTED])
@pytest.mark.parametrize(
    ("format", "width"), [(None, None), ("float", 16), ("base64", 64)], ids=str
)
def test_they_are_those_of_a_plain_computation(
    client: OpenAI, folder: Path, model: str, format: Any, width: Any
) -> None:
    """By default OpenAI's client asks for base64 and decodes it."""
    asked: Json = {"encoding_format": format, "dimensions": width} if format else {}
    found = client.embeddings.create(model=model, input=TEXTS[:3], **asked)
    assert (found.model, [each.index for each in found.data]) == (model, [0, 1, 2])
    texts, hidden = tokens(folder, EMBEDS, TEXTS[:3]), network(folder / EMBEDS).model
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, texts))
    for each, text in zip(found.data, texts, strict=True):
        raw: Any = each.embedding
        assert isinstance(raw, str) == (format == "base64")
        states = np.array(hidden(mx.array([text]))[0])
        vector = (states.mean(axis=0) if model == MEAN else states[-1])[:width]
        given = np.frombuffer(base64.b64decode(raw), "<f4") if isinstance(raw, str) else raw
        same(given, vector / np.linalg.norm(vector))


def test_token_ids_and_a_prompt_of_the_files(client: OpenAI, folder: Path) -> None:
    ((*ids,),) = tokens(folder, EMBEDS, ["Query: x"])
    given: list[Json] = [
        {"input": "Query: x"},
        {"input": ids},
        {"input": "x", "extra_body": {"prompt_name": "query"}},
    ]
    asked = [client.embeddings.create(model=EMBEDS, **each) for each in given]
    written, *others = (found.data[0].embedding for found in asked)
    assert others == [written] * 2


def test_long_inputs_are_refused_or_cut(http: httpx.Client) -> None:
    long: Json = {"model": EMBEDS, "input": ["x", "x" * 3000]}
    error = posted(http, EMBEDDINGS, 400, **long)["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    cut = posted(http, EMBEDDINGS, **long, truncate=True)
    assert cut["usage"]["prompt_tokens"] == 1 + 2048
    whole = posted(http, EMBEDDINGS, model=EMBEDS, input="x" * 2048)
    same(cut["data"][1]["embedding"], whole["data"][0]["embedding"])


def test_ollamas_client(server: LiveServer, http: httpx.Client) -> None:
    wanted = posted(http, EMBEDDINGS, model=EMBEDS, input=TEXTS[:3])["data"]
    with ollama.Client(host=server.url, trust_env=False) as client:
        found = client.embed(EMBEDS, TEXTS[:3])
        assert found.prompt_eval_count
        for vector, each in zip(found.embeddings, wanted, strict=True):
            same(vector, each["embedding"])
        (cut,) = client.embed(EMBEDS, "x" * 3000).embeddings
        assert len(cut) == 64, "it is cut, unless that is refused"
        known = r"^the input length exceeds the context length\. .* length is 2048 tokens"
        with pytest.raises(ollama.ResponseError, match=known):
            client.embed(EMBEDS, "x" * 3000, truncate=False)
        same(client.embeddings(EMBEDS, TEXTS[0]).embedding, wanted[0]["embedding"])
        assert client.embed(EMBEDS, []).embeddings == []
        assert client.show(EMBEDS).capabilities == ["embedding"]
        assert len(client.embed(EMBEDS, "x", dimensions=16, keep_alive="5m").embeddings[0]) == 16
    body = {"model": EMBEDS, "input": "x", "options": {"seed": 1}}
    response = http.post("/api/embed", json=body)
    assert response.headers["x-mlx-server-ignored"] == "options.seed"


@pytest.mark.parametrize("instruction", [None, "Find names."])
def test_the_scores_are_those_of_a_plain_computation(
    http: httpx.Client, folder: Path, instruction: str | None
) -> None:
    query, documents = "Wie heißt sie? 🙂", [*TEXTS, TEXTS[0]]
    asked: Json = {"query": query, "documents": documents, "instruction": instruction}
    found = posted(http, RERANK, model=RANKS, **asked)
    assert (found["model"], found["id"][:7]) == (RANKS, "rerank-")
    named = {"instruct": instruction or WEB, "query": query}
    prompts = tokens(folder, RANKS, [PROMPT.format(**named, document=each) for each in documents])
    total = sum(map(len, prompts))
    assert found["usage"] == {"prompt_tokens": total, "total_tokens": total}
    ((no,), (yes,)), model = tokens(folder, RANKS, ["n", "y"]), network(folder / RANKS)
    for given, prompt in zip(scores(found), prompts, strict=True):
        logits = np.array(model(mx.array([prompt]))[0, -1], dtype=np.float64)
        assert given == pytest.approx(1 / (1 + np.exp(logits[no] - logits[yes])), abs=2e-4)
    assert len({round(each, 3) for each in scores(found)}) > 2, "they differ"


@pytest.mark.parametrize(
    ("model", "route"), [(EMBEDS, EMBEDDINGS), (CHATS, "/v1/chat/completions")]
)
def test_another_model_is_told_where_to_go(http: httpx.Client, model: str, route: str) -> None:
    refused = posted(http, RERANK, 400, model=model, query="q", documents=["x"])
    assert route in refused["error"]["message"]


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_of_encoders_as_the_files_pool_them(
    http: httpx.Client, folder: Path, name: str
) -> None:
    found = posted(http, EMBEDDINGS, model=name, input=WORDS)
    config, pooling = ENCODERS[name]
    ids = [[CLS, *text, SEP] for text in tokens(folder, name, WORDS)]
    assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
    weights = dict(weights_of(config))
    for each, text in zip(found["data"], ids, strict=True):
        same(each["embedding"], pooled(hidden_states(config, weights, text), pooling.split("_")[0]))


def test_ranks_of_encoders(http: httpx.Client, folder: Path) -> None:
    found = posted(http, RERANK, model=RANKER, query="who?", documents=WORDS)
    query, *texts = tokens(folder, RANKER, ["who?", *WORDS])
    weights = dict(weights_of(RANKING))
    for given, text in zip(scores(found), texts, strict=True):
        hidden = hidden_states(XLM_R, weights, [CLS, *query, SEP, *text, SEP])
        assert given == pytest.approx(score(XLM_R, weights, hidden), abs=2e-5)


def test_one_that_is_ready_is_announced_with_a_request(
    server: LiveServer, http: httpx.Client
) -> None:
    posted(http, RERANK, model=RANKER, query="q", documents=["d"])
    ready = f"{RANKER} is ready"
    eventually(lambda: any(line.startswith(ready) for line in server.printed), "it is announced")
    line = next(line for line in server.printed if line.startswith(ready))
    program, url, option, body = shlex.split(line.partition("try: ")[2])
    assert (program, option) == ("curl", "--json")
    assert httpx.post(url, json=json.loads(body)).json()["model"] == RANKER
