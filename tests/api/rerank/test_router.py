"""The route that ranks documents in the whole app: what its answer and its errors are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.api.rerank import PATH
from tests.api import wire
from tests.api.vector_engine import VectorEngine
from tests.tiny import tiny_reranker

BODY: dict[str, Any] = {"model": wire.MODEL, "query": "q", "documents": ["a", {"text": "b"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_reranker(tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def engine() -> VectorEngine:
    return VectorEngine()


@pytest.fixture(scope="module")
def client(model: Path, engine: VectorEngine) -> Iterator[TestClient]:
    with wire.client(model, engine) as client:
        yield client


def test_the_documents_are_ranked_and_returned_if_that_was_asked_for(client: TestClient) -> None:
    found = wire.ok(client.post(PATH, json={**BODY, "return_documents": True}))
    results = found["results"]
    assert [each["index"] for each in results] == [0, 1]
    assert [each["document"] for each in results] == [{"text": "a"}, {"text": "b"}]
    assert all(0 <= each["relevance_score"] <= 1 for each in results)
    assert found["usage"]["prompt_tokens"] > 0
    best = wire.ok(client.post(PATH, json={**BODY, "top_n": 1}))["results"]
    assert [sorted(each) for each in best] == [["index", "relevance_score"]]


def test_fields_without_effect_are_named_in_the_header(client: TestClient) -> None:
    body = {**BODY, "documents": [{"text": "a", "id": 5}], "max_chunks_per_doc": 1}
    response = client.post(PATH, json=body)
    assert response.headers["x-mlx-server-ignored"] == "max_chunks_per_doc, documents.id"
    assert "x-mlx-server-ignored" not in client.post(PATH, json=BODY).headers
