"""Embeddings over HTTP, from the engine of a real server, with the clients of OpenAI and Ollama."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import ollama
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.models.llama import Model, ModelArgs
from openai import BadRequestError, OpenAI

from mlx_server.models.tokenizer import Tokenizer
from tests.live.common import Models, common_models, folder_of
from tests.live.server import LiveServer
from tests.tiny import tiny_embedder, tiny_llama

EMBEDS, MEAN, CHATS, CONVERTED, BERT = "embeds", "mean", "chats", "converted", "bert"
TEXTS = ["Salü 🙂", "x", "A longer text, of more tokens than the others have. " * 4, "y"]
PATH = "/v1/embeddings"

Json = dict[str, Any]


@common_models
def models(folder: Path, _: object) -> Models:
    tiny_embedder(folder / EMBEDS)
    tiny_embedder(folder / MEAN, pooling="mean_tokens")
    tiny_llama(folder / CHATS)
    tiny_embedder(folder / BERT, pooling="cls_token")
    own = {name: {"source": name} for name in (EMBEDS, MEAN, CHATS, BERT)}
    return {**own, CONVERTED: {"source": CHATS, "task": "embed"}}


@pytest.fixture(scope="module")
def folder(server: LiveServer) -> Path:
    return folder_of(server, __name__)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with server.openai(max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder / EMBEDS / "tokenizer.json")


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    model = Model(ModelArgs.from_dict(json.loads((folder / EMBEDS / "config.json").read_text())))
    weights: Any = mx.load(str(folder / EMBEDS / "model.safetensors"))
    model.update(tree_unflatten(list(weights.items())))
    return model.model


def exact(network: Any, ids: list[int], *, mean: bool = False, width: int | None = None) -> Any:
    hidden = np.array(network(mx.array([ids]))[0])
    vector = (hidden.mean(axis=0) if mean else hidden[-1])[:width]
    return vector / np.linalg.norm(vector)


def refused(http: httpx.Client, **asked: Any) -> Json:
    response = http.post(PATH, json={"model": EMBEDS, "input": "x", **asked})
    assert response.status_code == 400, response.text
    found: Json = response.json()["error"]
    return found


@pytest.mark.parametrize("model", [EMBEDS, MEAN, CONVERTED])
@pytest.mark.parametrize("format", [None, "float", "base64"])
def test_they_are_those_of_a_plain_computation(
    client: OpenAI, network: Any, tokenizer: Tokenizer, model: str, format: Any
) -> None:
    """By default OpenAI's client asks for base64 and decodes it."""
    options: Json = {"encoding_format": format} if format else {}
    found = client.embeddings.create(model=model, input=TEXTS, **options)
    assert (found.model, [each.index for each in found.data]) == (model, [0, 1, 2, 3])
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
    for each, tokens in zip(found.data, ids, strict=True):
        raw: Any = each.embedding
        assert isinstance(raw, str) == (format == "base64")
        vector = np.frombuffer(base64.b64decode(raw), "<f4") if isinstance(raw, str) else raw
        wanted = exact(network, tokens, mean=model == MEAN)
        np.testing.assert_allclose(vector, wanted, atol=2e-5)


def test_many_are_what_each_is_alone(client: OpenAI) -> None:
    texts = [f"{number}: " + "x" * (number * 7 % 90) for number in range(70)]
    together = client.embeddings.create(model=EMBEDS, input=texts).data
    for place in (0, 13, 69):
        (alone,) = client.embeddings.create(model=EMBEDS, input=texts[place]).data
        np.testing.assert_allclose(together[place].embedding, alone.embedding, atol=2e-5)


def test_token_ids(client: OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Salü")
    by_text, by_ids, by_lists = (
        client.embeddings.create(model=EMBEDS, input=given).data[0].embedding
        for given in ("Salü", ids, [ids, [5]])
    )
    assert by_text == by_ids
    np.testing.assert_allclose(by_text, by_lists, atol=2e-5)


def test_a_prompt_of_the_files(client: OpenAI) -> None:
    by_name, written = (
        client.embeddings.create(model=EMBEDS, input=text, extra_body=extra).data[0].embedding
        for text, extra in (("x", {"prompt_name": "query"}), ("Query: x", {}))
    )
    assert by_name == written


def test_fewer_dimensions(client: OpenAI, network: Any, tokenizer: Tokenizer) -> None:
    (found,) = client.embeddings.create(model=EMBEDS, input="Salü", dimensions=16).data
    wanted = exact(network, tokenizer.encode("Salü"), width=16)
    np.testing.assert_allclose(found.embedding, wanted, atol=2e-5)
    with pytest.raises(BadRequestError, match="have 64"):
        client.embeddings.create(model=EMBEDS, input="x", dimensions=65)
    whole = client.embeddings.create(model=EMBEDS, input="x", dimensions=64).data[0]
    assert len(whole.embedding) == 64


def test_long_inputs_are_refused_or_cut(http: httpx.Client, network: Any) -> None:
    long: Json = {"input": ["x", "x" * 3000]}
    error = refused(http, **long)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    cut = http.post(PATH, json={"model": EMBEDS, **long, "truncate": True}).json()
    assert cut["usage"]["prompt_tokens"] == 1 + 2048
    whole = http.post(PATH, json={"model": EMBEDS, "input": "x" * 2048}).json()
    np.testing.assert_allclose(
        cut["data"][1]["embedding"], whole["data"][0]["embedding"], atol=2e-5
    )


def test_ollamas_client(server: LiveServer, http: httpx.Client) -> None:
    wanted = http.post(PATH, json={"model": EMBEDS, "input": TEXTS}).json()["data"]
    with ollama.Client(host=server.url, trust_env=False) as client:
        found = client.embed(EMBEDS, TEXTS)
        assert found.prompt_eval_count
        for vector, each in zip(found.embeddings, wanted, strict=True):
            np.testing.assert_allclose(vector, each["embedding"], atol=2e-5)
        (cut,) = client.embed(EMBEDS, "x" * 3000).embeddings
        assert len(cut) == 64, "it is cut, unless that is refused"
        known = r"^the input length exceeds the context length\. .* length is 2048 tokens"
        with pytest.raises(ollama.ResponseError, match=known):
            client.embed(EMBEDS, "x" * 3000, truncate=False)
        older = client.embeddings(EMBEDS, TEXTS[0]).embedding
        np.testing.assert_allclose(older, wanted[0]["embedding"], atol=2e-5)
        assert client.embed(EMBEDS, []).embeddings == []
        assert client.show(EMBEDS).capabilities == ["embedding"]
        assert len(client.embed(EMBEDS, "x", dimensions=16, keep_alive="5m").embeddings[0]) == 16
    body = {"model": EMBEDS, "input": "x", "options": {"seed": 1}}
    response = http.post("/api/embed", json=body)
    assert response.headers["x-mlx-server-ignored"] == "options.seed"
