"""Two models in room for one, from outside."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from mlx_server.models.files import weights_bytes
from tests.live.server import LiveServer, Watch, eventually, serving
from tests.tiny import tiny_llama


def asked(client: OpenAI, model: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
    return client.chat.completions.create(**{**body, **more})


def pool_of(server: LiveServer) -> dict[str, Any]:
    with server.http() as http:
        found: dict[str, Any] = http.get("/v1/pool").json()
        return found


def model_of(server: LiveServer, id: str) -> dict[str, Any]:
    found: dict[str, Any] = next(m for m in pool_of(server)["models"] if m["id"] == id)
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Their weights are large next to the KV cache of a short answer."""
    root = tmp_path_factory.mktemp("pair")
    return {id: tiny_llama(root / id, seed=seed, hidden=256) for seed, id in enumerate(("a", "b"))}


def config(models: dict[str, Path], budget: float) -> dict[str, Any]:
    """budget: in weights of one of the models."""
    (nbytes,) = {weights_bytes(path, upcast=True) for path in models.values()}
    return {
        "server": {"memory_budget": int(budget * nbytes)},
        "models": {id: {"source": str(path)} for id, path in models.items()},
    }


def test_two_models_in_room_for_one_take_turns(tmp_path: Path, pair: dict[str, Path]) -> None:
    def look() -> None:
        pool = http.get("/v1/pool").json()
        states = {model["id"]: model["state"] for model in pool["models"]}
        assert sum(state in ("loading", "ready", "unloading") for state in states.values()) <= 1
        assert pool["memory"]["used"] <= pool["memory"]["budget"]

    with (
        serving(tmp_path, config(pair, 1.7)) as server,
        server.openai() as client,
        server.http() as http,
    ):
        with Watch(look) as watch:
            reported: dict[str, set[str]] = {"a": set(), "b": set()}
            for id in "ababab":
                reported[id].add(asked(client, id).choices[0].message.content)
                assert model_of(server, id)["state"] == "ready"
            assert [len(texts) for texts in reported.values()] == [1, 1], "the same each time"
            assert reported["a"] != reported["b"]
            with ThreadPoolExecutor(6) as threads:
                crowd = [threads.submit(asked, client, id) for id in "abbaab"]
                assert "".join(each.result().model for each in crowd) == "abbaab"
        assert watch.looks > 10
        seen = pool_of(server)
        assert seen["memory"]["kv_reserved"] == 0
        engine = seen["processes"]["mlx_server.worker.process"]
        assert engine > seen["memory"]["used"] > seen["memory"]["prompt_cache"]
        assert seen["processes"]["mlx_server"] > 20_000_000
        assert " ERROR " not in server.log


def test_a_folder_that_is_replaced_by_a_larger_model_stays_within_the_budget(
    tmp_path: Path,
) -> None:
    folder, large = tiny_llama(tmp_path / "m"), tiny_llama(tmp_path / "large", hidden=1024)
    budget = 20_000_000
    assert weights_bytes(large, upcast=True) > budget > 2 * weights_bytes(folder, upcast=True)
    config = {
        "server": {"memory_budget": budget},
        "models": {"m": {"source": str(folder), "ttl": 0.1}},
    }

    def exchange(other: Path) -> None:
        eventually(lambda: model_of(server, "m")["state"] == "unloaded", "its time is up")
        folder.rename(tmp_path / f"{other.name}-before")
        other.rename(folder)

    with serving(tmp_path, config) as server, server.openai() as client:
        first = asked(client, "m").choices[0].message.content
        exchange(large)
        with pytest.raises(openai.BadRequestError) as refused:
            asked(client, "m")
        assert refused.value.code == "not_enough_memory"
        assert model_of(server, "m")["state"] == "unloaded"
        exchange(tiny_llama(tmp_path / "other", seed=5))
        assert asked(client, "m").choices[0].message.content != first
