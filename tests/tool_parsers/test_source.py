"""However a text is cut into pieces, and its delimiters into tokens, the same is read in it."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.tool_parsers.source import Source, Steps
from tests.slowness import slowness

T = TypeVar("T")

DELIMITERS = ("<a>", "</a>", "<a", "<ab>", "ab", "[X]", "<a><b>")
"""Some begin like others, or end with what others begin with; one is made of two."""


class Token(str):
    """A delimiter that was written as one token."""


Units = Sequence[str]


def played(units: Units, single: frozenset[str], read: Callable[[Source], Steps[T]]) -> T:
    """Every unit is fed by itself, so the reading has to wait wherever it can."""
    source = Source(single)
    steps = read(source)
    try:
        for unit in units:
            if isinstance(unit, Token):
                source.feed_delimiter(unit)
            else:
                source.feed(unit)
            next(steps)
        source.close(cut=False)
        while True:
            next(steps)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


texts = st.lists(st.sampled_from([*DELIMITERS, "a", "b", "<", ">", "/", "[", " "]), max_size=8).map(
    "".join
)


def sections(*delimiters: str) -> Callable[[Source], Steps[list[tuple[str, str]]]]:
    """The text before each delimiter, and the delimiter."""

    def read(source: Source) -> Steps[list[tuple[str, str]]]:
        found = []
        while True:
            pieces: list[str] = []
            delimiter = yield from source.up_to(*delimiters, into=pieces.append)
            assert all(pieces)
            found.append(("".join(pieces), delimiter))
            if not delimiter:
                return found

    return read


def leftmost_longest(text: str, delimiters: Sequence[str]) -> list[tuple[str, str]]:
    longest_first = "|".join(map(re.escape, sorted(delimiters, key=len, reverse=True)))
    *parts, rest = re.split(f"({longest_first})", text)
    return [*zip(parts[::2], parts[1::2], strict=True), (rest, "")]


@given(texts, st.integers(1, 9), st.sets(st.sampled_from(DELIMITERS), min_size=1))
def test_up_to_finds_the_first_and_longest_delimiter(
    text: str, size: int, delimiters: set[str]
) -> None:
    read = sections(*sorted(delimiters))
    assert played(cut(text, size), frozenset(), read) == leftmost_longest(text, sorted(delimiters))


SINGLE = frozenset({"<a>", "[X]"})


@given(
    st.lists(st.one_of(texts, st.sampled_from(sorted(SINGLE)).map(Token)), max_size=6),
    st.integers(1, 9),
)
def test_a_delimiter_of_the_vocabulary_counts_only_as_its_token(units: Units, size: int) -> None:
    pieces = [p for u in units for p in ([u] if isinstance(u, Token) else cut(u, size))]
    found = played(pieces, SINGLE, sections("<a>", "</a>", "[X]"))
    spelled = "".join(units)
    assert "".join(text + delimiter for text, delimiter in found) == spelled
    reported = [delimiter for _, delimiter in found if delimiter in SINGLE]
    assert reported == [unit for unit in units if isinstance(unit, Token)]
    # between the tokens, text is text
    parts = "".join(u if not isinstance(u, Token) else "\0" for u in units).split("\0")
    assert [m for _, m in found if m == "</a>"] == re.findall("</a>", "\0".join(parts))


@pytest.mark.parametrize("size", range(1, 12))
def test_a_delimiter_made_with_a_token_counts_only_with_it(size: int) -> None:
    single = frozenset({"<o>", "<s>"})
    read = sections("<o>call<s>")
    written = [Token("<o>"), *cut("call", size), Token("<s>"), "x"]
    assert played(written, single, read) == [("", "<o>call<s>"), ("x", "")]
    for spelled in (cut("<o>call<s>x", size), [Token("<o>"), *cut("call<s>x", size)]):
        assert played(spelled, single, read) == [("<o>call<s>x", "")]


@given(texts, st.integers(1, 9), st.lists(st.sampled_from(DELIMITERS), min_size=1, max_size=4))
def test_accept_takes_the_longest_that_comes(text: str, size: int, literals: list[str]) -> None:
    def read(source: Source) -> Steps[tuple[bool, str, str]]:
        comes = yield from source.comes(*literals)
        found = yield from source.accept(*literals)
        rest: list[str] = []
        yield from source.up_to(into=rest.append)
        return comes, found, "".join(rest)

    wanted = max((x for x in literals if text.startswith(x)), key=len, default="")
    expected = (bool(wanted), wanted, text[len(wanted) :])
    assert played(cut(text, size), frozenset(), read) == expected


@given(st.text(alphabet="ab \n\t", max_size=12), st.integers(1, 4))
def test_space_and_runs(text: str, size: int) -> None:
    def read(source: Source) -> Steps[tuple[str, str, bool]]:
        space = yield from source.space()
        run: list[str] = []
        yield from source.match(re.compile("[ab]+"), run.append)
        return space, "".join(run), not (yield from source.peek())

    match = re.fullmatch(r"(\s*)([ab]*)(.*)", text, re.DOTALL)
    assert match
    space, run, rest = match.groups()
    assert played(cut(text, size), frozenset(), read) == (space, run, not rest)


@given(texts, st.integers(1, 9), st.integers(0, 9))
def test_what_is_read_is_kept_to_the_character(text: str, size: int, before: int) -> None:
    def read(source: Source) -> Steps[str]:
        for _ in range(before):
            yield from source.peek()
            source.take(1)
        source.keep("!")
        yield from source.space()
        yield from source.up_to("ab", into=lambda piece: None)
        return source.kept()

    rest = text[before:]
    space = len(rest) - len(rest.lstrip())
    at = rest.find("ab", space)
    wanted = rest if at < 0 else rest[: at + 2]
    assert played(cut(text, size), frozenset(), read) == "!" + wanted


def in_pieces(source: Source, steps: Steps[Any], text: str, size: int) -> float:
    began = time.thread_time()
    for piece in cut(text, size):
        source.feed(piece)
        next(steps, None)
    source.close(cut=False)
    next(steps, None)
    return time.thread_time() - began


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["x" * 400_000, "<" * 400_000, "<tool" * 80_000, "<tool_call>" * 36_000, " " * 400_000],
    ids=["text", "beginnings", "halves", "delimiters", "space"],
)
@pytest.mark.parametrize("size", [4, 400_000], ids=["tokens", "whole"])
def test_long_texts_take_time_by_their_length(text: str, size: int) -> None:
    """Far under a second; four times the time and more, if each piece looked at all the others."""
    source = Source()
    source.keep()
    seconds = in_pieces(source, sections("<tool_call>", "</tool_call>")(source), text, size)
    assert source.kept() == text
    assert seconds < 4 * slowness()
