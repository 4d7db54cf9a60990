"""Embeddings and ranks in the whole app, of a text, token ids or several of them."""

import struct
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.rerank import RerankBody, ranked
from mlx_server.engine.client import RowStream
from mlx_server.engine.messages import Embed, Embedded
from mlx_server.generation.embeddings import GROUP_ROWS, GROUP_TOKENS
from mlx_server.generation.rerank import Relevance
from mlx_server.requests import DETERMINISTIC_HEADER
from tests.api import wire
from tests.api.wire import ScriptedEngine
from tests.tiny import tiny_embedder, tiny_reranker


class VectorEngine(ScriptedEngine):
    """The numbers are 0 and the last token's id, in texts that are computed together."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded: list[Embed] = []

    @asynccontextmanager
    async def embed(self, rows: Sequence[Embed]) -> AsyncIterator[RowStream]:
        answers = RowStream()
        for row in rows:
            row.row = len(self.embedded)
            self.embedded.append(row)
            if not self.silent and not self.failure:
                vectors = [struct.pack("<2f", 0, ids[-1]) for ids in row.inputs]
                answers.put(Embedded(row.row, vectors))
        if self.failure:
            answers.fail(self.failure)
        with self.computing(row.row for row in rows):
            yield answers


EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
RANKER = "ranker"
RANKED: dict[str, Any] = {"model": RANKER, "query": "q", "documents": ["a", {"text": "b"}]}
IGNORED = "x-mlx-server-ignored"


@pytest.fixture(scope="module")
def engine() -> VectorEngine:
    return VectorEngine()


@pytest.fixture(scope="module")
def client(engine: VectorEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    others = {RANKER: tiny_reranker(tmp_path_factory.mktemp("reranker"))}
    embedder = tiny_embedder(tmp_path_factory.mktemp("embedder"))
    with TestClient(wire.app(embedder, engine, others=others), "http://localhost") as found:
        yield found


def embed(client: TestClient, given: Any, **asked: Any) -> Any:
    return client.post(EMBEDDINGS, json={"model": wire.MODEL, "input": given, **asked})


def test_the_same_bits_can_be_asked_for(client: TestClient, engine: VectorEngine) -> None:
    for path, body in ((EMBEDDINGS, {"model": wire.MODEL, "input": "a"}), (RERANK, RANKED)):
        for value in ("false", "true"):
            headers = {DETERMINISTIC_HEADER: value}
            wire.ok(client.post(path, json=body, headers=headers))
            assert engine.embedded[-1].deterministic is (value == "true")
        assert client.post(path, json=body, headers={DETERMINISTIC_HEADER: "x"}).status_code == 400


@pytest.mark.parametrize(
    ("given", "count"), [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1, 2], [3]], 2)]
)
def test_a_list_of_token_ids_is_one_input(client: TestClient, given: Any, count: int) -> None:
    assert len(wire.ok(embed(client, given))["data"]) == count


@pytest.mark.parametrize("count", [0, limits.EMBEDDING_INPUTS + 1])
def test_there_are_some_inputs_and_not_too_many(client: TestClient, count: int) -> None:
    error = wire.error(embed(client, ["a"] * count))
    assert (error["param"], f"has {count} inputs" in error["message"]) == ("input", True)


BYTES_OF_A_TOKEN = 48
"""The memory that the largest batch may take for each of its tokens, of which a list has eight."""


@pytest.mark.slow
@pytest.mark.parametrize("route", [EMBEDDINGS, RERANK])
def test_the_largest_batch_is_computed_in_small_groups(
    client: TestClient, engine: VectorEngine, route: str
) -> None:
    texts = [f"{place} of many.{' and on' * (place % 40)}" for place in range(2048)]
    body: dict[str, Any] = {"model": wire.MODEL, "input": texts}
    if route == RERANK:
        body = {"model": RANKER, "query": "q", "documents": texts}
    engine.embedded.clear()
    tracemalloc.start()
    found = wire.ok(client.post(route, json=body))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    results = found.get("data") or found["results"]
    assert sorted(each["index"] for each in results) == list(range(len(texts)))
    rows = [row.inputs for row in engine.embedded]
    assert sum(map(len, rows)) == len(texts)
    assert all(len(row) <= GROUP_ROWS for row in rows)
    assert all(len(row) == 1 or len(row) * max(map(len, row)) <= GROUP_TOKENS for row in rows)
    assert most < BYTES_OF_A_TOKEN * found["usage"]["prompt_tokens"]


def test_documents_are_ranked_and_returned_if_that_was_asked_for(client: TestClient) -> None:
    found = wire.ok(client.post(RERANK, json={**RANKED, "return_documents": True}))
    results = found["results"]
    assert [each["index"] for each in results] == [0, 1]
    assert [each["document"] for each in results] == [{"text": "a"}, {"text": "b"}]
    assert all(0 <= each["relevance_score"] <= 1 for each in results)
    assert found["usage"]["prompt_tokens"] > 0
    best = wire.ok(client.post(RERANK, json={**RANKED, "top_n": 1}))["results"]
    assert [sorted(each) for each in best] == [["index", "relevance_score"]]


def test_the_best_come_first_and_documents_that_are_alike_stay_apart() -> None:
    body = RerankBody.model_validate({**RANKED, "documents": ["a", {"text": ""}, "a"], "top_n": 2})
    texts = [each.text for each in body.documents]
    assert texts == ["a", "", "a"]
    found = ranked(Relevance("m", (0.1, 0.9, 0.5), 7), texts, body)
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert found["results"] == [
        {"index": 1, "relevance_score": 0.9},
        {"index": 2, "relevance_score": 0.5},
    ]


def test_fields_without_effect_are_named_in_the_header(client: TestClient) -> None:
    assert embed(client, "a", late_chunking=True, user="me").headers[IGNORED] == "late_chunking"
    assert IGNORED not in embed(client, "a").headers
    body = {**RANKED, "documents": [{"text": "a", "id": 5}], "max_chunks_per_doc": 1}
    header = client.post(RERANK, json=body).headers[IGNORED]
    assert header == "max_chunks_per_doc, documents.id"
    assert IGNORED not in client.post(RERANK, json=RANKED).headers
