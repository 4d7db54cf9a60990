"""What a layout says of its delimiters, and where an answer begins."""

import pytest

from mlx_server.families import FAMILIES
from mlx_server.parsers.markup_layout import MarkupLayout
from mlx_server.parsers.parse_context import THINK

TWO = MarkupLayout(reasoning=(THINK, ("<seed:think>", "</seed:think>"), ("[A]\n", "[/A]")))
LAYOUTS = [pytest.param(each.layout_with(), id=each.name) for each in FAMILIES]


@pytest.mark.parametrize(
    ("ends_with", "expected"),
    [
        ("", None),
        ("<think>", "</think>"),
        ("assistant\n<think>\n\n", "</think>"),
        ("<think></think>", None),
        ("<think>\nHm", None),
        ("<seed:think>\n", "</seed:think>"),
        ("[A]", "[/A]"),
        ("[A]\n", "[/A]"),
    ],
)
def test_the_prompts_end_may_open_reasoning(ends_with: str, expected: str | None) -> None:
    assert TWO.inside(ends_with) == expected


def test_calls_end_reasoning_only_where_there_is_reasoning() -> None:
    assert MarkupLayout(ends_reasoning=("x",)).ends_of_reasoning == ("</think>", "x")
    assert MarkupLayout(reasoning=(), calls_end_reasoning=True).ends_of_reasoning == ()


def test_beginnings_of_delimiters_are_those_after_a_control_token() -> None:
    layout = MarkupLayout(
        reasoning=(("<|c>thought", "<c|>"),), dropped=("<|c>x", "other"), halves=("<|c>", "<|ch>")
    )
    assert set(layout.torn) == {"<|c>", *("<|c>thought"[:size] for size in range(5, 11))}
    assert MarkupLayout().torn == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_family_has_a_delimiter_that_is_found_everywhere(layout: MarkupLayout) -> None:
    """An empty one, or one of white space, would open reasoning at the end of each prompt."""
    for delimiter in (*layout.opens_reasoning, *layout.ends_of_reasoning, *layout.calls):
        assert delimiter.strip()
