"""The route of embeddings in the whole app: what its answer and its errors are."""

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.api.embeddings import PATH
from tests.api import wire
from tests.api.vector_engine import VectorEngine
from tests.tiny import tiny_embedder

BODY: dict[str, Any] = {"model": wire.MODEL, "input": [[5, 6], [7]]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def engine() -> VectorEngine:
    return VectorEngine()


@pytest.fixture(scope="module")
def client(model: Path, engine: VectorEngine) -> Iterator[TestClient]:
    with wire.client(model, engine) as client:
        yield client


def test_each_input_has_its_vector_in_the_form_that_was_asked_for(client: TestClient) -> None:
    found = wire.ok(client.post(PATH, json=BODY))
    assert [each["embedding"] for each in found["data"]] == [[0, 6], [0, 7]]
    assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert found["model"] == wire.MODEL
    written = wire.ok(client.post(PATH, json={**BODY, "encoding_format": "base64"}))
    vectors = [base64.b64decode(each["embedding"]) for each in written["data"]]
    assert vectors == [struct.pack("<2f", 0, 6), struct.pack("<2f", 0, 7)]


def test_fields_without_effect_are_named_in_the_header(client: TestClient) -> None:
    response = client.post(PATH, json={**BODY, "late_chunking": True, "user": "me"})
    assert response.headers["x-mlx-server-ignored"] == "late_chunking"
    assert "x-mlx-server-ignored" not in client.post(PATH, json=BODY).headers
