"""What a delimiter is, by the vocabulary and at the end of an answer."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.parsers.markup_parser import MarkupLayout, MarkupParser
from mlx_server.parsers.parse_context import ParseContext
from tests.parsers.markup.played import (
    CLOSE,
    CONTROL,
    LAYOUT,
    NOW,
    OPEN,
    TOOLS,
    folded,
    heard,
    noise,
    reading,
    units,
)


def test_delimiters_of_the_vocabulary_are_no_text_and_text_is_no_delimiter() -> None:
    output = f"a <think>b</think> {OPEN}{NOW}{CLOSE}"
    parser = MarkupParser(LAYOUT, ParseContext(tools=TOOLS, control=CONTROL))
    assert folded(heard(parser, [(-1, c) for c in output], cut=False)) == {"text": output}


@given(noise, st.integers(1, 7))
def test_only_delimiters_are_lost(output: str, size: int) -> None:
    """Where there are no calls; and white space next to them."""
    found = reading(output, size, layout=MarkupLayout(), tools=())
    said = found.get("reasoning", "") + found.get("text", "")
    assert without_tags(said) == without_tags(output)


def without_tags(text: str) -> str:
    """The characters of a text in any order: reasoning may stand after text."""
    return "".join(sorted(re.sub(r"</?think>|\s", "", text)))


STOP = "<|stop|>"
STOPS = replace(LAYOUT, stops=(STOP,))


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_a_stop_token_that_is_spelled_out_is_no_text_at_the_end(size: int) -> None:
    for output in (f"Done.{STOP}", f"<think>Hm.</think>Done.{STOP}\n"):
        assert reading(output, size, layout=STOPS)["text"].strip() == "Done."
    assert reading(f"{OPEN}{NOW}{CLOSE}{STOP}", size, layout=STOPS) == {"calls": [{}]}


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_a_stop_token_is_text_within_a_text_and_where_the_vocabulary_has_it(size: int) -> None:
    about = f"It ends with {STOP} as a rule."
    assert reading(about, size, layout=STOPS) == {"text": about}
    ending = f"It ends with {STOP}"
    parser = MarkupParser(STOPS, ParseContext(control={9: STOP}))
    said = units(ending, size, {})
    assert folded(heard(parser, said, cut=False)) == {"text": ending}
