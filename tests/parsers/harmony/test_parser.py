"""gpt-oss's answers, whatever the model writes. What they should read is in the golden files."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server.events import (
    BuiltInCall,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
)
from mlx_server.messages import Message, Tool, ToolCall
from mlx_server.parsers.harmony_grammar import harmony_output
from mlx_server.parsers.harmony_parser import HarmonyParser
from mlx_server.parsers.harmony_text import DELIMITERS, HarmonyTextParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.prompts.harmony.vocabulary import SPECIAL, TOKENS, encoding
from tests.parsers.harmony.played import (
    BROWSER,
    CALL,
    PIECES,
    PYTHON,
    TOOLS,
    content_of,
    heard,
    ids,
    parser,
    played,
)
from tests.slowness import slowness
from tests.tables import cases

# Calls


FINAL = "<|channel|>final<|message|>"


@cases
def test_text_is_held_as_long_as_it_may_be_a_call(text: str, passed_on: bool) -> None:
    reading = parser()
    events = [event for token in ids(FINAL + text) for event in reading.feed(token, "")]
    assert content_of(events) == ([["text", text]] if passed_on else [])
    assert content_of(events + reading.finish(cut=True)) == [["text", text]]


@pytest.mark.parametrize("reading", [ParseContext(), ParseContext(tools=TOOLS, formatted=True)])
def test_where_nothing_can_be_called_no_text_is_a_call(reading: ParseContext) -> None:
    text = '{"name": "note", "arguments": {"text": "x"}}'
    events: list[Event] = []
    of_text = HarmonyParser(encoding(), reading)
    for token in ids(FINAL + text):
        events += of_text.feed(token, "")
    assert content_of(events) == [["text", text]]
    assert of_text.finish(cut=False) == []


@pytest.mark.slow
def test_long_arguments_take_no_long_time() -> None:
    text = 'naïve \\n \\"code\\" 🗼 ' * 4000
    begun = time.thread_time()
    ((_, _, arguments),) = heard(CALL + f'{{"text": "{text}"}}')
    assert time.thread_time() - begun < 4 * slowness()
    assert arguments == {"text": json.loads(f'"{text}"')}
    found = heard(FINAL + f'{{"name": "note", "arguments": {{"text": "{text}"}}}}')
    assert time.thread_time() - begun < 8 * slowness()
    assert found == [["call", "note", arguments]]


@pytest.mark.parametrize("words", ["word " * 500, "🗼" * 500, "n" + "🗼" * 500, "no" + "🗼" * 500])
def test_a_long_answer_without_a_header_is_passed_on_while_it_comes(words: str) -> None:
    reading = parser()
    events = [event for token in ids(words)[:400] for event in reading.feed(token, "")]
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert len(text) > 80
    assert words.startswith(text)
    assert heard(words) == [["text", words]]


# Headers and messages


@given(st.lists(st.integers(0, TOKENS - 1), max_size=30), st.booleans())
def test_no_byte_of_a_text_is_lost(tokens: list[int], ended: bool) -> None:
    whole = b"".join(bytes(encoding()._inner.decode_bytes([token])) for token in tokens)
    end = ids("<|return|>") if ended else []
    events = played([*ids("<|channel|>final<|message|>"), *tokens, *end])
    found = "".join(text for _, text in content_of(events))
    assert whole.decode("utf-8", "replace") in (found, f"{found}\ufffd")


@pytest.mark.parametrize("name", ["a b", "a<|call|>b", "a\n>b"])
def test_no_name_ends_its_header(name: str) -> None:
    written = harmony_output(Message("assistant", tool_calls=(ToolCall("1", name, "{}"),)))
    header, _, arguments = written.partition("<|message|>")
    assert arguments == "{}"
    assert header.removeprefix("<|channel|>commentary to=functions.a_").startswith(
        ("b ", "call_b ")
    )


# Anything at all

CONTROL = st.integers(TOKENS, TOKENS + len(SPECIAL)).map(lambda id: [id])
ANY = st.integers(0, 201_500).map(lambda id: [id])
TOKENS_OF_ANY_KIND = st.lists(PIECES.map(ids) | CONTROL | ANY, max_size=25).map(
    lambda lists: [token for tokens in lists for token in tokens]
)


@settings(max_examples=150)
@given(TOKENS_OF_ANY_KIND, st.booleans(), st.sampled_from([TOOLS, (PYTHON, BROWSER), ()]))
def test_whatever_the_model_writes(tokens: list[int], cut: bool, tools: tuple[Tool, ...]) -> None:
    reading = parser(tools)
    events = [event for token in tokens for event in reading.feed(token, "")]
    events += reading.finish(cut=cut)
    texts = TextDelta | ReasoningDelta | BuiltInCall
    said = "".join(e.text for e in events if isinstance(e, texts))
    written = "".join(e.arguments for e in events if isinstance(e, ToolCallDelta))
    assert not any(token in said + written for token in SPECIAL)
    assert "<|reserved_" not in said + written
    assert all(e.text for e in events if isinstance(e, TextDelta | ReasoningDelta))
    for call in {e.call for e in events if isinstance(e, ToolCallFinished)}:
        pieces = [e.arguments for e in events if isinstance(e, ToolCallDelta) and e.call == call]
        assert isinstance(json.loads("".join(pieces)), dict)


# Answers that continue a message


def continued(header: str, output: str) -> list[Any]:
    context = ParseContext(tools=TOOLS, ends_with=header, continues=True)
    reading = HarmonyParser(encoding(), context)
    events = [event for token in ids(output) for event in reading.feed(token, "")]
    return content_of([*events, *reading.finish(cut=False)])


@cases
def test_an_answer_goes_on_in_the_message_that_the_prompt_began(
    channel: str, output: str, expected: list[Any] | None
) -> None:
    wanted = [["text", output]] if expected is None else expected
    assert continued(f"<|channel|>{channel}<|message|>", output) == wanted


# Harmony that came as text

TEXTS = PIECES | st.sampled_from([*DELIMITERS, "<|", "assistantfinal", "assistantcommentary", ":"])


def read(text: str, size: int, *, cut: bool) -> list[Any]:
    reading = HarmonyTextParser(encoding(), ParseContext(tools=TOOLS))
    pieces = (text[at : at + size] for at in range(0, len(text), size))
    events = [event for piece in pieces for event in reading.feed(-1, piece)]
    return content_of(events + reading.finish(cut=cut))


@given(text=st.lists(TEXTS, max_size=8).map("".join), size=st.integers(1, 7), cut=st.booleans())
def test_it_does_not_matter_how_a_text_is_cut(text: str, size: int, cut: bool) -> None:
    try:
        whole = read(text, len(text) + 1, cut=cut)
    except ValueError:  # a call that is not closed has no JSON
        return
    assert read(text, size, cut=cut) == whole
    assert not any(mark in part for part in whole if part[0] == "text" for mark in DELIMITERS)
