"""The numbers that the page shows: of answers, of speed and of memory."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.answer_log import AnswerLog
from mlx_server.api.answer_metrics import AnswerMetrics
from mlx_server.api.samples import SECONDS, Samples
from mlx_server.engine.messages import StepOutput, Token
from mlx_server.errors import EngineDied, Overloaded
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
from mlx_server.page.streams import PageStreams
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


def step(tokens: int) -> StepOutput:
    return StepOutput("m", [Token(0, 5)] * tokens, 0, 0, 0)


class Clock:
    now = 1_000_000.0 * SECONDS

    def __call__(self) -> float:
        return self.now


def test_speed_counts_the_time_in_which_tokens_came() -> None:
    clock = Clock()
    samples = Samples(clock)
    for _ in range(11):
        samples.stepped(step(4))
        clock.now += 0.1
    clock.now += 3  # nothing to do
    samples.stepped(step(4))
    samples.first_token(1.0)
    samples.first_token(3.0)
    found = samples.columns()
    assert found["at"] == [1_000_000 * SECONDS]
    assert found["tokens_per_second"] == [pytest.approx(40, rel=0.01)]
    assert found["first_token_seconds"] == [2.0]


def test_memory_is_the_most_of_its_time_and_nothing_is_sampled_while_nothing_happens() -> None:
    clock = Clock()
    samples = Samples(clock)
    samples.memory(100)
    samples.memory(900)
    samples.memory(500)
    clock.now += 40 * SECONDS
    samples.memory(500)
    samples.memory(200)
    found = samples.columns()
    assert found["memory"] == [900, 500]
    assert found["memory_now"] == 200
    assert [at - found["at"][0] for at in found["at"]] == [0, 40 * SECONDS]


def test_samples_are_bounded_in_number_and_in_time() -> None:
    clock, most = Clock(), limits.SAMPLES.value
    samples = Samples(clock)
    for number in range(most + 50):
        samples.memory(number + 1)
        clock.now += SECONDS
    assert len(samples.columns()["at"]) == most
    clock.now += SECONDS * (most - 10)
    assert len(samples.columns()["at"]) == 10


def test_a_client_has_so_many_streams_and_others_have_theirs() -> None:
    streams, most = PageStreams(), limits.PAGE_STREAMS.value
    taken = [streams.take("me") for _ in range(most)]
    for place in taken:
        place.__enter__()
    with pytest.raises(Overloaded, match="close some of its tabs"), streams.take("me"):
        pass
    with streams.take("you"):
        pass
    taken[0].__exit__(None, None, None)
    with streams.take("me"):
        pass


def test_streams_end_when_the_server_stops() -> None:
    async def run() -> None:
        streams = PageStreams()
        waiting = asyncio.create_task(streams.pause(60))
        await asyncio.sleep(0)
        streams.end()
        assert not await waiting
        assert not await streams.pause(60)

    asyncio.run(run())
