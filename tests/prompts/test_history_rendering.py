"""Calls of earlier turns as text."""

from collections.abc import Callable

import pytest

from mlx_server.prompts.history_rendering import as_json_array, as_python_list, in_hermes_tags
from tests.prompts.normalized import call


def closed(text: str) -> str:
    return f"({text})"


CALLED = [call("1", "f", '{"a": "x\'", "b": [true, null]}'), call("2", "g", "[1]")]

WRITTEN: list[tuple[Callable[..., str], str]] = [
    (
        in_hermes_tags,
        '<tool_call>\n{"name": ("f"), "arguments": ({"a": "x\'", "b": [true, null]})}\n</tool_call>'
        '\n<tool_call>\n{"name": ("g"), "arguments": ([1])}\n</tool_call>',
    ),
    (
        as_json_array("<|a|>", "<|b|>"),
        '<|a|>[{"name": ("f"), "arguments": ({"a": "x\'", "b": [true, null]})}, '
        '{"name": ("g"), "arguments": ([1])}]<|b|>',
    ),
    (as_python_list("<|a|>", "<|b|>"), '<|a|>[(f(a="x\'", b=[True, None])), (g([1]))]<|b|>'),
]


@pytest.mark.parametrize(("write", "expected"), WRITTEN)
def test_calls_as_text_close_all_that_is_not_the_familys(
    write: Callable[..., str], expected: str
) -> None:
    assert write(CALLED, closed) == expected
