"""The answers that the page lists: under way and ended, with texts where the owner wants them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.errors import EngineDied
from mlx_server.http.answer_log import AnswerLog
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine

KEYS = ("one-key", "another-key")


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def shared(tiny_path: Path, engine: ScriptedEngine) -> Iterator[TestClient]:
    keys = tuple(map(wire.key, KEYS))
    with wire.client(tiny_path, engine, api_keys=keys) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def requests(client: TestClient, key: str) -> list[Json]:
    found: list[Json] = wire.ok(client.get("/page/history", headers=bearer(key)))["requests"]
    return found


def test_a_request_is_listed_for_its_own_key_and_without_its_text(
    shared: TestClient, engine: ScriptedEngine
) -> None:
    body = {"model": wire.MODEL, "prompt": "a secret", "max_tokens": 9}
    first, second = KEYS
    wire.ok(shared.post("/v1/completions", json=body, headers=bearer(first)))
    engine.failure = EngineDied("gone")
    shared.post("/v1/completions", json=body, headers=bearer(first))
    engine.failure = None
    failed, done = requests(shared, first)
    assert (done["model"], done["finish"], done["completion_tokens"]) == (wire.MODEL, "length", 9)
    assert done["prompt_tokens"] == len("a secret")
    assert 0 < done["first_token_seconds"] <= done["seconds"]
    assert failed["finish"] == "engine_died"
    assert not any("secret" in str(value) for value in done.values())
    assert requests(shared, second) == []


def test_texts_are_listed_where_the_owner_wants_them(
    tiny_path: Path, engine: ScriptedEngine
) -> None:
    one, other = KEYS
    keys = tuple(map(wire.key, KEYS))
    said = [{"role": "user", "content": "rules"}, {"role": "user", "content": "a secret"}]
    body = {"model": wire.MODEL, "messages": said, "max_tokens": 9}
    with wire.client(tiny_path, engine, api_keys=keys, page="texts") as client:
        answer = wire.ok(client.post("/v1/chat/completions", json=body, headers=bearer(one)))
        [listed] = requests(client, one)
        assert requests(client, other) == []
    texts = listed["texts"]
    assert texts["asked"] == "a secret"
    message = answer["choices"][0]["message"]
    assert texts["answer"] == (message["content"] or "")
    assert texts["thoughts"] == (message.get("reasoning") or "")
    assert texts["answer"] or texts["thoughts"]


def test_so_many_answers_are_listed_and_the_latest_first() -> None:
    log, most = AnswerLog(), limits.LISTED_ANSWERS
    for number in range(most + 1):
        with log.record("me") as record:
            record.model = str(number)
    listed = [ended["model"] for ended in log.ended("me")]
    assert listed == [str(number) for number in range(most, 0, -1)]
    assert log.totals["ended"] == most + 1
