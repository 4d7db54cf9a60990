"""What OpenAI's bodies have no place for: there only if there is something to say."""

import asyncio
from typing import cast

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mlx_server.api.chat_completions.answer import ChatOutput
from mlx_server.api.completions import CompletionOutput
from mlx_server.events import Event, Finished, Repaired, Started, TextDelta, TokenCounts, Violation
from mlx_server.http.metrics import Metrics
from mlx_server.pool.pool import Pool
from tests.api.folding import body_of, chunks_of
from tests.api.observed import played
from tests.api.strict import assert_strict

ENDS = [Finished(1, "stop", TokenCounts(1)), Finished(0, "stop", TokenCounts(1))]
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
OF_BOTH = {"unenforced": ["properties.a.not"]}
UNMET = {"unmet": [{"index": 1, "what": "$: no"}]}
NOTHING: list[Event] = [Started("any", 1), TextDelta(0, "a"), TextDelta(1, "b"), *ENDS]


def output(chat: bool) -> ChatOutput | CompletionOutput:
    return ChatOutput("any", 2) if chat else CompletionOutput("any", 1, 2)


@pytest.mark.parametrize("chat", [True, False])
def test_a_body_and_the_ends_of_a_stream_have_warnings(chat: bool) -> None:
    body = body_of(output(chat), MENDED)
    assert body["mlx_server"] == {"repairs": [*OF_0, *OF_1], **OF_BOTH, **UNMET}
    assert_strict(ChatCompletion if chat else Completion, body)
    chunks = [chunk for chunk in chunks_of(output(chat), MENDED) if "mlx_server" in chunk]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["stop", "stop"]
    assert [chunk["mlx_server"] for chunk in chunks] == [
        {"repairs": OF_1, **OF_BOTH, **UNMET},
        {"repairs": OF_0, **OF_BOTH},
    ]
    for chunk in chunks:
        assert_strict(ChatCompletionChunk if chat else Completion, chunk)
    others = [body_of(output(chat), NOTHING), *chunks_of(output(chat), NOTHING)]
    assert not any("mlx_server" in each for each in others)


def test_repairs_are_counted() -> None:
    metrics = Metrics(cast(Pool, None))
    asyncio.run(played(metrics.answers, MENDED, len(MENDED)))

    def count(what: str) -> float | None:
        labels = {"model": "any", "what": what}
        return metrics.registry.get_sample_value("mlx_server_repairs_total", labels)

    assert [count(what) for what in ("json", "type", "reasoning", "name")] == [1, 1, 1, None]
