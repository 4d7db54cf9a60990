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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_family_has_a_delimiter_that_is_found_everywhere(layout: MarkupLayout) -> None:
    """An empty one, or one of white space, would open reasoning at the end of each prompt."""
    for delimiter in (*layout.opens_reasoning, *layout.ends_of_reasoning, *layout.calls):
        assert delimiter.strip()
