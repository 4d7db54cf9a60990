"""Answers are counted from their events, also those that end early."""

import asyncio
from collections.abc import AsyncGenerator

from prometheus_client import CollectorRegistry

from mlx_server.events import (
    Event,
    Finished,
    Repaired,
    RowProgress,
    Started,
    TextDelta,
    TokenCounts,
)
from mlx_server.http.metrics import AnswerMetrics
from tests.api.observed import played


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
