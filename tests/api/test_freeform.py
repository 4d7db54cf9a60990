import json
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from mlx_server.api.freeform import (
    FreeformInput,
    TextGrammar,
    arguments_of_text,
    freeform_tool,
    text_of_arguments,
)
from tests.tables import cases


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


@given(st.text(), st.lists(st.integers(0, 10_000), max_size=8), st.booleans())
def test_a_text_is_decoded_however_it_is_cut(text: str, cuts: list[int], ascii: bool) -> None:
    decoded = FreeformInput()
    arguments = json.dumps({"input": text}, ensure_ascii=ascii)
    found = [decoded.feed(piece) for piece in pieces(arguments, cuts)] + [decoded.finish()]
    assert "".join(found) == decoded.text == text


@given(st.text(min_size=1), st.integers(0, 10_000))
@example("code with \\uD83D", 28)
def test_what_is_decoded_early_is_never_taken_back(text: str, cut: int) -> None:
    arguments = arguments_of_text(text)
    decoded = FreeformInput()
    decoded.feed(arguments[: cut % len(arguments)])
    assert text_of_arguments(arguments).startswith(decoded.text)


def test_a_pair_of_escapes_is_one_character() -> None:
    decoded = FreeformInput()
    parts = ['{"input": "', "\\ud83d", "\\ude", '42"}']
    assert [decoded.feed(part) for part in parts] == ["", "", "", "\U0001f642"]


@cases
def test_what_the_text_of_a_call_is(arguments: str, text: str) -> None:
    assert text_of_arguments(arguments) == text


def test_a_tool_has_one_argument_and_says_what_it_must_match() -> None:
    tool = freeform_tool("patch", "Patches.", TextGrammar(definition="a+", syntax="regex"))
    assert (tool.name, tool.description) == ("patch", "Patches.")
    (argument,) = tool.parameters["properties"].values()
    assert argument["type"] == "string"
    assert "regular expression:\na+" in argument["description"]
    assert tool.parameters["required"] == ["input"]
    plain = freeform_tool("patch", None, None)
    assert "must match" not in str(plain.parameters)
