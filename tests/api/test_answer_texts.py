"""The texts that the page lists are those of the first answer, up to a limit."""

import asyncio

from prometheus_client import CollectorRegistry

from mlx_server import limits
from mlx_server.events import (
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from mlx_server.http.metrics import AnswerMetrics
from tests.api.observed import played


def test_listed_texts_are_of_the_first_answer_and_have_a_limit() -> None:
    metrics = AnswerMetrics(CollectorRegistry())
    metrics.log.keeps_texts = True
    most = limits.LISTED_TEXT
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
