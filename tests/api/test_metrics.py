"""What is counted of requests, the engine and answers: metrics, samples and what the page lists."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.accumulator import Accumulator, Timing
from mlx_server.engine.messages import DiskCacheUse, StepOutput, Token
from mlx_server.errors import EngineDied
from mlx_server.events import (
    Event,
    Finished,
    PromptProgress,
    ReasoningDelta,
    Repaired,
    RowProgress,
    Started,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallStarted,
)
from mlx_server.http.answer_log import AnswerLog
from mlx_server.http.metrics import SAMPLE_SECONDS, AnswerMetrics, MetricsSamples
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine, sample
from tests.clocks import Clock


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


# Metrics


def test_metrics_count_requests(client: TestClient) -> None:
    name = 'mlx_server_requests_total{model="tiny",outcome="completed"}'
    body = {"model": wire.MODEL, "prompt": "a"}
    client.post("/v1/completions", json=body)
    before = client.get("/metrics").text
    client.post("/v1/completions", json=body)
    assert sample(client.get("/metrics").text, name) == sample(before, name) + 1


def test_metrics_know_the_engines_steps_its_rest_and_its_files(tiny_path: Path) -> None:
    app = wire.app(tiny_path, ScriptedEngine())
    step = StepOutput("tiny", [Token(1, 5)], 3, 7, cache_bytes=0, buffer_bytes=5, peak_bytes=9)
    app.state.pool.events.step(step)
    for nbytes in (10, 20):
        app.state.pool.events.disk_cache(DiskCacheUse(1, 2, 300, 4000, 500, nbytes))
    with TestClient(app, base_url="http://localhost") as client:
        app.state.pool.row_slots.taken = 4
        busy = client.get("/metrics").text
        app.state.pool.row_slots.taken = 0
        idle = client.get("/metrics").text
    names = ("batch_size", "queue", "active_bytes", "buffer_bytes", "peak_bytes")
    assert [sample(busy, f"mlx_server_{name}") for name in names] == [1, 3, 7, 5, 9]
    assert [sample(idle, f"mlx_server_{name}") for name in names] == [0, 0, 7, 5, 9]
    totals = ("hits", "misses", "tokens", "read_bytes", "written_bytes")
    counts = [sample(idle, f"mlx_server_disk_cache_{name}_total") for name in totals]
    assert counts == [2, 4, 600, 8000, 1000]
    assert sample(idle, "mlx_server_disk_cache_bytes") == 20


# Answers that are listed


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
        shown = (reading["state"], reading["prompt_tokens"], reading["computed_tokens"])
        assert shown == ("prompt", 40, 30)
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


def test_an_ended_answer_has_its_counts_and_where_wanted_its_first_texts_up_to_a_limit() -> None:
    metrics = AnswerMetrics(CollectorRegistry())
    metrics.log.keeps_texts = True
    most = limits.LISTED_TEXT
    events: list[Event] = [
        Started("m", 40),
        ReasoningDelta(0, "why"),
        TextDelta(1, "another answer"),
        TextDelta(0, "a" * (most - 1)),
        TextDelta(0, "bc"),
        Repaired(0, "json", "content"),
        ToolCallStarted(0, 0, "id", "roll"),
        ToolCallDelta(0, 0, "{}"),
        ToolCallStarted(0, 1, "id2", "roll"),
        Finished(0, "stop", TokenCounts(5, cached_tokens=32, further_prompt_tokens=10)),
    ]
    asyncio.run(played(metrics, events, len(events), ("x" * (most + 1),)))
    [ended] = metrics.log.ended(None)
    assert (ended["finish"], ended["repairs"], ended["cached_tokens"]) == ("stop", 1, 32)
    assert ended["prompt_tokens"] == 50
    assert metrics.log.totals == {"ended": 1, "prompt_tokens": 50, "cached_tokens": 32}
    assert ended["texts"] == {
        "asked": "x" * most,
        "thoughts": "why",
        "answer": "a" * (most - 1) + "b",
        "calls": "roll {}\nroll ",
    }


def test_so_many_answers_are_listed_and_the_latest_first() -> None:
    log, most = AnswerLog(), limits.LISTED_ANSWERS
    for number in range(most + 1):
        with log.record("me") as record:
            record.model = str(number)
    listed = [ended["model"] for ended in log.ended("me")]
    assert listed == [str(number) for number in range(most, 0, -1)]
    assert log.totals["ended"] == most + 1


@pytest.mark.parametrize("page", [True, "texts"])
def test_requests_are_listed_for_their_own_key(tiny_path: Path, page: bool | str) -> None:
    engine, bodies = ScriptedEngine(), {"authorization": "Bearer one"}
    keys = (wire.key("one"), wire.key("other"))
    said = [{"role": "user", "content": "rules"}, {"role": "user", "content": "a secret"}]
    body = {"model": wire.MODEL, "messages": said, "max_tokens": 9}
    with wire.client(tiny_path, engine, api_keys=keys, page=page) as client:

        def requests(key: str) -> list[Json]:
            headers = {"authorization": f"Bearer {key}"}
            listed: list[Json] = wire.ok(client.get("/page/history", headers=headers))["requests"]
            return listed

        answer = wire.ok(client.post("/v1/chat/completions", json=body, headers=bodies))
        engine.failure = EngineDied("gone")
        client.post("/v1/chat/completions", json=body, headers=bodies)
        failed, done = requests("one")
        assert requests("other") == []
    assert (done["model"], done["finish"], done["completion_tokens"]) == (wire.MODEL, "length", 9)
    assert done["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert 0 < done["first_token_seconds"] <= done["seconds"]
    assert failed["finish"] == "engine_died"
    if page == "texts":
        assert done["texts"]["asked"] == "a secret"
        assert done["texts"]["answer"] == answer["choices"][0]["message"]["content"]
    else:
        assert not any("secret" in str(value) for value in done.values())


# Usage and times


def test_usage_counts_a_prompt_and_what_is_cached_of_it_once_for_its_answers() -> None:
    accumulator = Accumulator("asked", prompts=2, n=2)
    accumulator.add(Started("m", 20, tool_output_tokens=2))
    for i, cached in enumerate((3, 4, 5, 6)):
        further = 30 if i == 3 else 0
        counts = TokenCounts(10, cached, reasoning_tokens=1, further_prompt_tokens=further)
        accumulator.add(Finished(i, "stop", counts))
    assert accumulator.usage() == {
        "prompt_tokens": 50,
        "completion_tokens": 40,
        "total_tokens": 90,
        "prompt_tokens_details": {"cached_tokens": 3 + 5, "tool_output_tokens": 2},
        "completion_tokens_details": {
            "reasoning_tokens": 4,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def test_the_first_token_ends_the_prompt_and_speeds_are_of_what_was_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an answer with an event each second."""
    seconds, second = 0, 10**9
    monkeypatch.setattr("mlx_server.api.accumulator.time.perf_counter_ns", lambda: seconds * second)
    timing = Timing()
    events: list[Event] = [Started("m", 7), *(PromptProgress(0, 7, 0, done) for done in (3, 7))]
    for event in [*events, *(TextDelta(0, text) for text in "abc")]:
        seconds += 1
        timing.note(event)
    assert timing.durations(7, 3) == {
        "total_duration": 6 * second,
        "load_duration": second,
        "prompt_eval_count": 7,
        "prompt_eval_duration": 3 * second,
        "eval_count": 3,
        "eval_duration": 2 * second,
    }
    found = timing.timings(10, 4, 4)
    assert (found["cache_n"], found["prompt_n"], found["prompt_per_second"]) == (4, 6, 2.0)
    assert (found["predicted_n"], found["predicted_per_token_ms"]) == (4, 500.0)
    nothing = timing.timings(3, 7, 0)
    assert (nothing["prompt_n"], nothing["predicted_per_token_ms"]) == (0, 0.0)


# Samples


BEGUN = 1_000_000.0 * SAMPLE_SECONDS


def test_speed_counts_the_time_in_which_tokens_came() -> None:
    clock, step = Clock(BEGUN), StepOutput("m", [Token(0, 5)] * 4, 0, 0, 0)
    samples = MetricsSamples(clock)
    for _ in range(11):
        samples.stepped(step)
        clock.now += 0.1
    clock.now += 3  # nothing to do
    samples.stepped(step)
    samples.first_token(1.0)
    samples.first_token(3.0)
    found = samples.columns()
    assert found["at"] == [1_000_000 * SAMPLE_SECONDS]
    assert found["tokens_per_second"] == [pytest.approx(40, rel=0.01)]
    assert found["first_token_seconds"] == [2.0]


def test_memory_is_the_most_of_its_time_and_nothing_is_sampled_while_nothing_happens() -> None:
    clock = Clock(BEGUN)
    samples = MetricsSamples(clock)
    for nbytes in (100, 900, 500):
        samples.memory(nbytes)
    clock.now += 40 * SAMPLE_SECONDS
    for nbytes in (500, 200):
        samples.memory(nbytes)
    found = samples.columns()
    assert (found["memory"], found["memory_now"]) == ([900, 500], 200)
    assert [at - found["at"][0] for at in found["at"]] == [0, 40 * SAMPLE_SECONDS]


def test_samples_are_bounded_in_number_and_in_time() -> None:
    clock, most = Clock(BEGUN), limits.SAMPLES
    samples = MetricsSamples(clock)
    for number in range(most + 50):
        samples.memory(number + 1)
        clock.now += SAMPLE_SECONDS
    assert len(samples.columns()["at"]) == most
    clock.now += SAMPLE_SECONDS * (most - 10)
    assert len(samples.columns()["at"]) == 10
