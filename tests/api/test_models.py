"""Models as the list has them."""

from pathlib import Path

from starlette.testclient import TestClient

from tests.api import wire
from tests.api.wire import ok


def test_a_model_of_the_list(client: TestClient, tiny_path: Path) -> None:
    (found,) = ok(client.get("/v1/models"))["data"]
    assert found == ok(client.get(f"/v1/models/{wire.MODEL}"))
    facts = {
        "context_length": 2048,
        "max_model_len": 2048,
        "max_context_length": 2048,
        "arch": "llama",
        "quantization": "f32",
        "size_bytes": (tiny_path / "model.safetensors").stat().st_size,
        "state": "not-loaded",
        "type": "llm",
        "adapters": [],
    }
    assert facts.items() <= found.items()
    assert found["architecture"]["input_modalities"] == ["text"]


def test_a_loaded_model_says_so_and_the_same_otherwise(client: TestClient) -> None:
    (before,) = ok(client.get("/v1/models"))["data"]
    body = {"model": wire.MODEL, "prompt": "x", "max_tokens": 1}
    ok(client.post("/v1/completions", json=body))
    (after,) = ok(client.get("/v1/models"))["data"]
    assert after == {**before, "state": "loaded", "batching": True}


def test_models(client: TestClient) -> None:
    (listed,) = wire.ok(client.get("/v1/models"))["data"]
    assert listed == wire.ok(client.get("/v1/models/tiny"))
    assert (listed["id"], listed["object"], listed["owned_by"]) == ("tiny", "model", "mlx-server")
