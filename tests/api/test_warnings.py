"""What OpenAI's bodies have no place for: there only if there is something to say."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mlx_server.api.chat_completions.answer import ChatOutput
from mlx_server.api.completions import CompletionOutput
from mlx_server.events import Event, Finished, Repaired, Started, TextDelta, Violation
from mlx_server.http.metrics import Metrics
from mlx_server.pool.pool import Pool
from tests.api.folding import body_of, chunks_of
from tests.api.observed import played
from tests.api.strict import assert_strict
from tests.api.wire import Json

ENDS = [Finished(1, "stop", 1, 0), Finished(0, "stop", 1, 0)]
MENDED: list[Event] = [
    Started("any", 1, unenforced=("properties.a.not",)),
    TextDelta(0, "a"),
    Repaired(1, "reasoning", "content"),
    TextDelta(1, "b"),
    Repaired(0, "json", "tool_calls[0].function.arguments"),
    Repaired(0, "type", "tool_calls[0].function.arguments.a"),
    Violation(1, "$: no"),
    *ENDS,
]
OF_0 = [
    {"index": 0, "what": "json", "where": "tool_calls[0].function.arguments"},
    {"index": 0, "what": "type", "where": "tool_calls[0].function.arguments.a"},
]
OF_1 = [{"index": 1, "what": "reasoning", "where": "content"}]
UNENFORCED = ["properties.a.not"]
UNMET = [{"index": 1, "what": "$: no"}]
NOTHING: list[Event] = [Started("any", 1), TextDelta(0, "a"), TextDelta(1, "b"), *ENDS]


def output(chat: bool) -> ChatOutput | CompletionOutput:
    shared: Any = {"model": "any", "n": 2, "logprobs": False, "include_usage": True}
    return ChatOutput(**shared) if chat else CompletionOutput(prompts=1, **shared)


def whole(events: Sequence[Event], chat: bool) -> Json:
    return body_of(output(chat), events)


def chunks(events: Sequence[Event], chat: bool) -> list[Json]:
    return chunks_of(output(chat), events)


BOTH = pytest.mark.parametrize("chat", [True, False])


@BOTH
def test_a_body_tells_all_of_it(chat: bool) -> None:
    body = whole(MENDED, chat)
    reported = {"repairs": [*OF_0, *OF_1], "unenforced": UNENFORCED, "unmet": UNMET}
    assert body["mlx_server"] == reported
    assert_strict(ChatCompletion if chat else Completion, body)


@BOTH
def test_a_stream_tells_it_with_the_end_of_each_answer(chat: bool) -> None:
    found = [chunk for chunk in chunks(MENDED, chat) if "mlx_server" in chunk]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == ["stop", "stop"]
    assert [chunk["mlx_server"] for chunk in found] == [
        {"repairs": OF_1, "unenforced": UNENFORCED, "unmet": UNMET},
        {"repairs": OF_0, "unenforced": UNENFORCED},
    ]
    for chunk in found:
        assert_strict(ChatCompletionChunk if chat else Completion, chunk)


@BOTH
def test_nothing_to_say(chat: bool) -> None:
    assert "mlx_server" not in whole(NOTHING, chat)
    assert not any("mlx_server" in chunk for chunk in chunks(NOTHING, chat))


def test_only_the_answer_that_was_mended_says_so() -> None:
    events: list[Event] = [Started("any", 1), Repaired(1, "cut", "content"), *ENDS]
    found = [chunk for chunk in chunks(events, chat=True) if "mlx_server" in chunk]
    assert [chunk["choices"][0]["index"] for chunk in found] == [1]


def test_repairs_are_counted() -> None:
    metrics = Metrics(cast(Pool, None))

    asyncio.run(played(metrics.answers, MENDED, len(MENDED)))

    def count(what: str) -> float | None:
        labels = {"model": "any", "what": what}
        return metrics.registry.get_sample_value("mlx_server_repairs_total", labels)

    assert [count(what) for what in ("json", "type", "reasoning", "name")] == [1, 1, 1, None]
