"""What becomes of events: blocks in their order, and the same message however it is sent."""

from collections.abc import Sequence
from typing import Any

import pytest

from mlx_server.api.messages.answer import MessagesOutput, OutputOptions
from mlx_server.events import (
    Event,
    Finished,
    PromptProgress,
    ReasoningDelta,
    Repaired,
    Started,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.http.security import Signer
from tests.api.folding import body_of, chunks_of
from tests.api.messages.talking import assert_event, assert_message, gathered, nameless
from tests.api.wire import Json
from tests.tables import cases

SIGNER = Signer(b"key")
BEGUN: list[Event] = [Started("m", 50)]
DONE = Finished(0, "stop", TokenCounts(9, cached_tokens=20, reasoning_tokens=4))
CALLED = Finished(0, "tool_calls", TokenCounts(9, cached_tokens=20))


def call(number: int, id: str, *arguments: str, whole: bool = True) -> list[Event]:
    deltas = [ToolCallDelta(0, number, piece) for piece in arguments]
    end = [ToolCallFinished(0, number)] if whole else []
    return [ToolCallStarted(0, number, id, "f"), *deltas, *end]


def output(**options: Any) -> MessagesOutput:
    return MessagesOutput(model="m", signer=SIGNER, options=OutputOptions(**options))


def chunks(events: Sequence[Event], **options: Any) -> list[Json]:
    found = chunks_of(output(**options), events)
    for chunk in found:
        assert_event(chunk)
    return found


def message(events: Sequence[Event], **options: Any) -> Json:
    """As it is sent whole, which is what a client makes of the stream."""
    found = body_of(output(**options), events)
    assert_message(found)
    assert nameless(gathered(chunks(events, **options))) == nameless(found)
    return found


def content(*events: Event, **options: Any) -> list[Json]:
    found: list[Json] = message([*BEGUN, *events], **options)["content"]
    return found


def test_thought_text_and_calls() -> None:
    assert content(
        ReasoningDelta(0, "H"),
        ReasoningDelta(0, "m."),
        TextDelta(0, "I "),
        TextDelta(0, "look."),
        *call(0, "call_1", '{"a"', ": 1}"),
        *call(1, "call_2", "{}"),
        CALLED,
    ) == [
        {"type": "thinking", "thinking": "Hm.", "signature": SIGNER.sign("Hm.")},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_2", "name": "f", "input": {}},
    ]


def test_a_text_of_another_phase_is_another_block() -> None:
    events = [
        TextDelta(0, "I ", phase="commentary"),
        TextDelta(0, "look."),
        TextDelta(0, "It ", phase="final_answer"),
        TextDelta(0, "rains."),
    ]
    texts = [block["text"] for block in content(*events, DONE)]
    assert texts == ["I look.", "It rains."]


def test_an_omitted_thought_comes_in_its_signature() -> None:
    (thought, text) = content(
        ReasoningDelta(0, "Hm."), TextDelta(0, "a"), DONE, omits_thoughts=True
    )
    assert thought["thinking"] == ""
    assert SIGNER.opened(thought["signature"]) == "Hm."
    assert text["text"] == "a"


@pytest.mark.parametrize("id", ["functions.f:0", "a b", "", "é"])
def test_an_id_that_clients_would_refuse_is_replaced(id: str) -> None:
    events = [*BEGUN, *call(0, id, "{}"), CALLED]
    (block,) = body_of(output(), events)["content"]
    assert block["id"].startswith("toolu_")


def test_a_call_that_was_cut_off_is_not_in_the_whole_message() -> None:
    """And its stream ends with the reason for it."""
    cut = Finished(0, "length", TokenCounts(9))
    events = [*BEGUN, *call(0, "1", "{}"), *call(1, "2", '{"a', whole=False), cut]
    found = body_of(output(), events)
    assert [block["id"] for block in found["content"]] == ["1"]
    assert found["stop_reason"] == "max_tokens"
    kinds = [chunk["type"] for chunk in chunks(events)]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_text_after_a_call_that_was_given_up() -> None:
    events = [*BEGUN, *call(0, "1", '{"a', whole=False), TextDelta(0, "So."), DONE]
    found = body_of(output(), events)
    assert found["content"] == [{"type": "text", "text": "So."}]
    assert found["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        (DONE, "end_turn", None),
        (CALLED, "tool_use", None),
        (Finished(0, "length", TokenCounts(9)), "max_tokens", None),
        (Finished(0, "stop", TokenCounts(9), stop_string="x"), "stop_sequence", "x"),
    ],
)
def test_why_it_ended(finished: Finished, reason: str, sequence: str | None) -> None:
    found = message([*BEGUN, TextDelta(0, "a"), finished])
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


# The prompt


def usage(**options: Any) -> Json:
    found: Json = message([*BEGUN, TextDelta(0, "a"), DONE], **options)["usage"]
    assert found["output_tokens_details"] == {"thinking_tokens": 4}
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(found[part] for part in parts) == 50
    return found


@cases
def test_the_parts_of_the_prompt(options: Json, stored: int) -> None:
    found = usage(**options)
    assert found["cache_read_input_tokens"] == 20
    assert found["cache_creation_input_tokens"] == stored


def test_pings_while_the_prompt_is_computed() -> None:
    progress = [PromptProgress(0, 50, 20, done) for done in (30, 50)]
    first, *pings = chunks([*BEGUN, *progress])
    assert first["message"]["usage"]["cache_read_input_tokens"] == 20
    assert pings == [{"type": "ping"}, {"type": "ping"}]


def test_the_first_event_waits_until_the_cached_tokens_are_known() -> None:
    assert chunks(BEGUN) == []
    first, *_ = chunks([*BEGUN, DONE])
    assert first["message"]["usage"]["cache_read_input_tokens"] == 20


def test_an_answer_that_is_not_wanted() -> None:
    found = message([*BEGUN, ReasoningDelta(0, "H"), DONE], is_empty=True)
    assert (found["content"], found["usage"]["output_tokens"]) == ([], 0)
    assert found["stop_reason"] == "max_tokens"


def test_what_was_mended_is_told() -> None:
    repaired = Repaired(0, "json", "tool_calls[0].function.arguments")
    found = message([*BEGUN, *call(0, "1", "{}"), repaired, CALLED])
    assert found["mlx_server"]["repairs"][0]["what"] == "json"
