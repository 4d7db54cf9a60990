"""Where a string ends that holds its own quotes."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.tables import cases
from tests.tool_parsers.slips import WRITERS, read

pytestmark = pytest.mark.slow


PIECES = (
    "'",
    '"',
    "'",
    '"',
    " ",
    "a",
    "it's",
    ",",
    ", b",
    "=",
    ")",
    "(",
    "]",
    "}",
    "{",
    ":",
    "-c",
    "call:",
)
commands = st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map("".join)


@pytest.mark.parametrize("examples", [20, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", WRITERS)
def test_a_command_with_quotes_in_it_is_whole_or_no_call(family: str, examples: int) -> None:
    """Models and templates forget to escape: what is run must be all that was written."""

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(text=commands, quote=st.sampled_from("'\""), size=st.integers(1, 7), cut=st.booleans())
    def any_command(text: str, quote: str, size: int, cut: bool) -> None:
        # which opens a string of Python's that is closed there
        assume(not text.startswith(quote * 2))
        check(family, text, quote, size, cut=cut)

    any_command()


def check(family: str, text: str, quote: str, size: int, *, cut: bool) -> None:
    output = WRITERS[family](quote, text)
    found = read(family, output, size)
    for call in found.calls:
        assert call.arguments["command"] == text, output
    if not found.calls:
        assert output.startswith(found.text), "but for delimiters that nothing has opened"
        assert text in found.text
    begin = output.index("command")
    for end in range(begin, output.index(text, begin) + len(text)):
        if not {"'", '"'} & set(text):
            assert not read(family, output[:end], size, cut=cut).calls, output[:end]


@cases
def test_what_can_end_in_one_place_only_is_a_call(family: str, text: str) -> None:
    (call,) = read(family, WRITERS[family]("'", text)).calls
    assert call.arguments["command"] == text


@pytest.mark.parametrize("text", ['"}]', '"} ]', '"}], "a'])
def test_a_bracket_in_a_string_that_was_not_escaped_ends_no_call(text: str) -> None:
    """Though it looks like the end of an array whose last call lacks a brace."""
    assert not read("qwen3", WRITERS["qwen3"]("'", text)).calls


@pytest.mark.parametrize("text", ["echo 'a", "echo 'a' 'b", "don' run"])
def test_a_string_whose_end_is_in_doubt_is_no_call(text: str) -> None:
    for family in ("lfm2", "olmo3"):
        output = WRITERS[family]("'", text)
        found = read(family, output)
        assert not found.calls
        assert found.text == output
