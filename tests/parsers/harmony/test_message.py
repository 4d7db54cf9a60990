"""One message of an answer: its content is passed on as it comes, to the last byte."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.events import TextDelta, ToolCallDelta
from mlx_server.parsers.harmony_parser import HarmonyParser
from mlx_server.prompts.harmony.vocabulary import TOKENS, encoding
from tests.parsers.harmony.played import CALL, PYTHON, content_of, heard, ids, parser, played


def test_pythons_code_is_its_argument_as_it_stands() -> None:
    output = '<|channel|>analysis to=python code<|message|>print("1\n")\n{}'
    assert heard(output, (PYTHON,)) == [["call", "python", {"code": 'print("1\n")\n{}'}]]
    begun = [["call", "python", r'{"code": "print(\"1\n\")\n{}']]
    assert heard(output, (PYTHON,), cut=True) == begun


def test_arguments_stream_as_they_come() -> None:
    reading = parser()
    events = [reading.feed(token, "") for token in ids(CALL + '{"text": "one two three')]
    pieces = [e.arguments for step in events for e in step if isinstance(e, ToolCallDelta)]
    assert len(pieces) > 3
    assert "".join(pieces) == '{"text": "one two three'
    assert reading.section == "call"


@pytest.mark.parametrize("end", ["", "<|call|>", "<|end|>", "<|call|><|start|>assistant"])
def test_a_call_is_finished_by_the_end_of_its_message(end: str) -> None:
    found = [["call", "note", {"text": "x"}]]
    assert heard(CALL + '{"text": "x"}' + end) == found
    assert heard(CALL + '{"text": "x"}' + end, cut=True) == found


@pytest.mark.parametrize(
    "arguments",
    ["[1]", '"x"', "null", '{"text": "x"} {"text": "y"}', '{"text": "x"', '{"text": x', "{"],
)
def test_arguments_that_are_none_are_text(arguments: str) -> None:
    *begun, last = heard(CALL + arguments + "<|call|>")
    assert last == ["text", arguments]
    assert all(isinstance(call[2], str) for call in begun), "no call is finished"


@pytest.mark.parametrize(
    ("output", "messages"),
    [
        ("", []),
        ("<|channel|>final<|message|>a", [(None, "final", None, "a")]),
        ("<|channel|>final<|message|>", [(None, "final", None, "")]),
        ("<|channel|>final a b c d<|message|>e", [(None, "final", None, "a b c de")]),
        ("<|channel|>final a b", [(None, "final", None, "a b")]),
        (CALL + "{}<|call|>", [("functions.note", "commentary", "<|constrain|>json", "{}")]),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=python"
            "<|channel|>analysis code<|message|>1<|call|>",
            [(None, "analysis", None, "a"), ("python", "analysis", "code", "1")],
        ),
    ],
)
def test_messages(output: str, messages: list[Any]) -> None:
    reading = parser()
    for token in ids(output):
        reading.feed(token, "")
    if not output.endswith(" b"):  # a header that is still open is none
        assert messages_of(reading) == messages, "messages that have not ended are reported"
    reading.finish(cut=False)
    assert messages_of(reading) == messages


def messages_of(reading: HarmonyParser) -> list[tuple[Any, ...]]:
    return [
        (m.get("recipient"), m.get("channel"), m.get("content_type"), m["content"][0]["text"])
        for m in reading.messages()
    ]


@given(st.lists(st.integers(0, TOKENS - 1), max_size=30), st.booleans())
def test_no_byte_of_a_text_is_lost(tokens: list[int], ended: bool) -> None:
    whole = b"".join(bytes(encoding()._inner.decode_bytes([token])) for token in tokens)
    end = ids("<|return|>") if ended else []
    events = played([*ids("<|channel|>final<|message|>"), *tokens, *end])
    found = "".join(text for _, text in content_of(events))
    assert whole.decode("utf-8", "replace") in (found, f"{found}\ufffd")


@given(st.text(max_size=40))
def test_characters_that_take_several_tokens_are_whole(text: str) -> None:
    plain: list[int] = encoding().encode(text, disallowed_special=())
    events = played([*ids("<|channel|>final<|message|>"), *plain])
    assert "".join(text for _, text in content_of(events)) == text
    assert all("\ufffd" not in e.text for e in events if isinstance(e, TextDelta)) or (
        "\ufffd" in text
    )
