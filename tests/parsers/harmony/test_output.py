"""An answer that is written as gpt-oss does is read back as it was."""

from typing import Any

import pytest

from mlx_server.messages import Message, ToolCall
from mlx_server.parsers.harmony_grammar import harmony_output
from tests.parsers.harmony.played import heard

A = ToolCall("1", "get_time", "{}")
B = ToolCall("2", "note", '{"text": "Salü \\ud83d\\ude42 to=x", "n": 3}')


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Message("assistant"), []),
        (Message("assistant", "Hi."), [["text", "Hi."]]),
        (Message("assistant", reasoning="Hm."), [["reasoning", "Hm."]]),
        (Message("assistant", " a\n", reasoning="b\n"), [["reasoning", "b\n"], ["text", " a\n"]]),
        (
            Message("assistant", "I look.", reasoning="Hm.", tool_calls=(A, B)),
            [
                ["reasoning", "Hm."],
                ["text", "I look."],
                ["call", "get_time", {}],
                ["call", "note", {"text": "Salü 🙂 to=x", "n": 3}],
            ],
        ),
    ],
)
def test_it_is_read_back(answer: Message, expected: list[Any]) -> None:
    assert heard(harmony_output(answer)) == expected


def test_a_text_before_calls_is_no_final_answer() -> None:
    final, preamble = (
        harmony_output(Message("assistant", "Hi.", tool_calls=calls)) for calls in ((), (A,))
    )
    assert final.startswith("<|channel|>final<|message|>")
    assert preamble.startswith("<|channel|>commentary<|message|>")


@pytest.mark.parametrize("name", ["a b", "a<|call|>b", "a\n>b"])
def test_no_name_ends_its_header(name: str) -> None:
    written = harmony_output(Message("assistant", tool_calls=(ToolCall("1", name, "{}"),)))
    header, _, arguments = written.partition("<|message|>")
    assert arguments == "{}"
    assert header.removeprefix("<|channel|>commentary to=functions.a_").startswith(
        ("b ", "call_b ")
    )
