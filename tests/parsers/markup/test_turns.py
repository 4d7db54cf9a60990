"""The header of an answer, as a prompt ends with it, is no part of the answer's text."""

from itertools import cycle

import pytest

import mlx_server
from mlx_server.events import TextDelta
from mlx_server.families import FAMILIES
from mlx_server.families.markup import MarkupFamily
from mlx_server.parsers.markup_layout import TURN_HEADERS
from tests.families.prompts import GOLDEN

WITHOUT_GOLDEN_PROMPT = {"<role>ASSISTANT</role>"}
"""The header of Ling and Ring, which have no family of their own."""

REASONING_CHARACTERS = 40
"""The most that stands after the header in a prompt: an opening delimiter of reasoning."""

MARKUP = [family.name for family in FAMILIES if isinstance(family, MarkupFamily)]


def text_of(answer: str, family: str, *, size: int) -> str:
    reader = mlx_server.OutputReader(family)
    pieces = [reader.feed(answer[at : at + size]) for at in range(0, len(answer), size)]
    events = [event for piece in [*pieces, reader.finish()] for event in piece]
    return "".join(event.separated for event in events if isinstance(event, TextDelta))


def test_each_header_ends_the_prompt_of_a_known_family() -> None:
    prompts = [path.read_text("utf-8") for path in sorted(GOLDEN.glob("*/without_thinking.txt"))]
    assert len(prompts) > 40
    ends = [prompt.partition("\n(ignored: ")[0] for prompt in prompts]
    unknown = {
        header
        for header in TURN_HEADERS
        if not any(header in end[-len(header) - REASONING_CHARACTERS :] for end in ends)
    }
    assert unknown == WITHOUT_GOLDEN_PROMPT


@pytest.mark.parametrize(("family", "header"), [*zip(cycle(MARKUP), [*TURN_HEADERS] * 4)])
def test_the_header_of_an_answer_is_no_text(family: str, header: str) -> None:
    assert text_of(f"{header}\n\nHello.", family, size=1) == "Hello."


@pytest.mark.parametrize("header", TURN_HEADERS)
@pytest.mark.parametrize("space", ["", "\n", " "])
def test_space_around_the_header_is_no_text_either(header: str, space: str) -> None:
    assert text_of(f"{space}{header}{space}Hello.", "plain", size=100) == "Hello."


@pytest.mark.parametrize("header", TURN_HEADERS)
def test_a_header_after_the_first_word_is_text(header: str) -> None:
    assert header in text_of(f"It begins with {header} there.", "gigachat", size=3)


@pytest.mark.parametrize("header", TURN_HEADERS)
def test_an_answer_that_only_begins_like_a_header_is_text(header: str) -> None:
    begun = header[:-1] + "X and more"
    assert text_of(begun, "gigachat", size=1) == begun
