"""The answers that the page lists: under way and ended, with texts where the owner wants them."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.answer_log import AnswerLog
from mlx_server.api.answer_metrics import AnswerMetrics
from mlx_server.errors import EngineDied
from mlx_server.events import (
    Event,
    Finished,
    ReasoningDelta,
    Repaired,
    RowProgress,
    Started,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallStarted,
)
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
    with wire.client(tiny_path, engine, api_keys=keys, page_texts=True) as client:
        answer = wire.ok(client.post("/v1/chat/completions", json=body, headers=bearer(one)))
        [listed] = requests(client, one)
        assert requests(client, other) == []
    texts = listed["texts"]
    assert texts["asked"] == "a secret"
    message = answer["choices"][0]["message"]
    assert texts["answer"] == (message["content"] or "")
    assert texts["thoughts"] == (message.get("reasoning") or "")
    assert texts["answer"] or texts["thoughts"]


def test_listed_texts_are_of_the_first_answer_and_have_a_limit() -> None:
    metrics = AnswerMetrics(CollectorRegistry())
    metrics.log.keeps_texts = True
    most = limits.LISTED_TEXT.value
    events: list[Event] = [
        Started("m", 1),
        ReasoningDelta(0, "why"),
        TextDelta(1, "another answer"),
        TextDelta(0, "a" * (most - 1)),
        TextDelta(0, "bc"),
        ToolCallStarted(0, 0, "id", "roll"),
        ToolCallDelta(0, 0, "{}"),
        ToolCallStarted(0, 1, "id2", "roll"),
        Finished(0, "stop", completion_tokens=5, cached_tokens=0),
    ]
    asyncio.run(played(metrics, events, len(events), ("x" * (most + 1),)))
    [ended] = metrics.log.ended(None)
    assert ended["texts"] == {
        "asked": "x" * most,
        "thoughts": "why",
        "answer": "a" * (most - 1) + "b",
        "calls": "roll {}\nroll ",
    }


async def played(
    log: AnswerMetrics, events: list[Event], take: int, prompts: tuple[str, ...] = ()
) -> None:
    async def source() -> AsyncGenerator[Event]:
        for event in events:
            yield event

    observed = log.observed(source(), "me", prompts)
    for _ in range(take):
        await anext(observed)
    if take == len(events):
        with pytest.raises(StopAsyncIteration):
            await anext(observed)
    await observed.aclose()


def test_an_answer_under_way_shows_how_far_it_is() -> None:
    metrics = AnswerMetrics(CollectorRegistry())
    progress, used = RowProgress(), TokenCounts()
    started = Started("m", 40, unfinished=lambda: used, rows=lambda: progress)

    async def answer() -> None:
        nonlocal progress, used

        async def source() -> AsyncGenerator[Event]:
            yield started
            yield TextDelta(0, "a")

        observed = metrics.observed(source(), "me")
        await anext(observed)
        progress = RowProgress(30)
        [reading] = metrics.log.running(None)
        assert (reading["state"], reading["prompt_tokens"], reading["computed_tokens"]) == (
            "prompt",
            40,
            30,
        )
        assert metrics.log.running("someone else") == []
        await anext(observed)
        used = TokenCounts(completion_tokens=7)
        [writing] = metrics.log.running("me")
        assert (writing["state"], writing["completion_tokens"]) == ("answer", 7)
        await observed.aclose()
        assert metrics.log.running(None) == []
        [ended] = metrics.log.ended("me")
        assert (ended["finish"], ended["completion_tokens"]) == ("cancelled", 7)

    asyncio.run(answer())


def test_an_ended_answer_counts_its_repairs_and_its_cached_tokens() -> None:
    metrics = AnswerMetrics(CollectorRegistry())
    events: list[Event] = [
        Started("m", 40),
        TextDelta(0, "a"),
        Repaired(0, "json", "content"),
        Finished(0, "stop", completion_tokens=5, cached_tokens=32, further_prompt_tokens=10),
    ]
    asyncio.run(played(metrics, events, len(events)))
    [ended] = metrics.log.ended(None)
    assert (ended["finish"], ended["repairs"], ended["cached_tokens"]) == ("stop", 1, 32)
    assert ended["prompt_tokens"] == 50
    assert metrics.log.totals == {"ended": 1, "prompt_tokens": 50, "cached_tokens": 32}


def test_so_many_answers_are_listed_and_the_latest_first() -> None:
    log, most = AnswerLog(), limits.LISTED_ANSWERS.value
    for number in range(most + 1):
        with log.record("me") as record:
            record.model = str(number)
    listed = [ended["model"] for ended in log.ended("me")]
    assert listed == [str(number) for number in range(most, 0, -1)]
    assert log.totals["ended"] == most + 1
