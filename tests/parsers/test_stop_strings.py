"""Stop strings, against a reference that reads one character at a time, and white space next to
delimiters, which belongs to them, however it comes.
"""

import random
import time
from collections.abc import Iterable
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.events import TextDelta, TokenLogprob
from mlx_server.parsers.text_pieces import StopStrings, WhitespaceTrimmer
from tests.slowness import slowness

# few letters, so that stops are often begun, broken off and overlapped
TEXTS = st.text("ab\nü🙂", max_size=30)
STOPS = st.lists(st.text("ab\nü🙂", min_size=1, max_size=4), max_size=4)


def cut_at(text: str, stops: Iterable[str]) -> int | None:
    """Where the match begins that is complete first; of those that are at once, the longest."""
    for end in range(1, len(text) + 1):
        complete = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return min(complete)
    return None


def released(text: str, stops: list[str], cuts: Iterable[int]) -> tuple[str, bool]:
    strings = StopStrings(stops)
    places = sorted({0, len(text), *cuts})
    deltas = [d for a, b in pairwise(places) for d in strings.feed(TextDelta(0, text[a:b]))]
    return "".join(delta.text for delta in [*deltas, *strings.finish()]), strings.matched


@given(text=TEXTS, stops=STOPS, seed=st.integers(0, 99))
def test_the_cut_is_the_same_however_the_text_comes(text: str, stops: list[str], seed: int) -> None:
    cut = cut_at(text, stops)
    expected = (text[:cut], cut is not None)
    at_random = random.Random(seed).choices(range(len(text) + 1), k=5)
    for cuts in ((), range(len(text)), range(0, len(text), 3), at_random):
        assert released(text, stops, cuts) == expected
    assert not any(stop in expected[0] for stop in stops)


@given(text=TEXTS, stops=STOPS)
def test_nothing_is_held_that_can_not_become_a_stop(text: str, stops: list[str]) -> None:
    strings = StopStrings(stops)
    out = ""
    for end, character in enumerate(text, start=1):
        out += "".join(delta.text for delta in strings.feed(TextDelta(0, character)))
        if strings.matched:
            return
        held = text[len(out) : end]
        assert out + held == text[:end]
        longest = max(
            (
                size
                for stop in stops
                for size in range(len(stop))
                if text[:end].endswith(stop[:size])
            ),
            default=0,
        )
        assert len(held) == longest


PIECES = st.lists(st.lists(st.text("abü", max_size=3), max_size=3), max_size=8)


@given(pieces=PIECES, stops=STOPS)
def test_a_tokens_logprob_comes_once_in_order_and_not_beyond_the_cut(
    pieces: list[list[str]], stops: list[str]
) -> None:
    """Each piece is a delta of as many tokens."""
    strings, tokens, deltas = StopStrings(stops), list[str](), list[TextDelta]()
    for piece in pieces:
        entries = tuple(map(logprob, count(len(tokens)), piece))
        deltas += strings.feed(TextDelta(0, "".join(piece), entries))
        tokens += piece
    deltas += strings.finish()
    text = "".join(tokens)
    cut = cut_at(text, stops)
    begins = [len("".join(tokens[:number])) for number in range(len(tokens))]
    before_the_cut = [
        number
        for number, token in enumerate(tokens)
        if cut is None or begins[number] < cut or (begins[number] == cut and not token)
    ]
    emitted = [int(entry.token) for delta in deltas for entry in delta.logprobs]
    assert emitted == before_the_cut[: len(emitted)]
    # tokens of no text that stand at the cut itself are neither before nor after it
    assert len(emitted) >= sum(cut is None or begin < cut for begin in begins)


def logprob(number: int, token: str) -> TokenLogprob:
    return TokenLogprob(str(number), token.encode(), -1.0)


def passed(space: WhitespaceTrimmer, text: str, size: int) -> str:
    return "".join(space.feed(text[at : at + size]) for at in range(0, len(text), size))


@pytest.mark.parametrize("size", [1, 4, 1 << 20])
def test_much_space_takes_time_by_its_length(size: int) -> None:
    space = WhitespaceTrimmer(trims=True)
    began = time.thread_time()
    assert passed(space, " " * 400_000 + "x", size) == " " * 400_000 + "x"
    assert time.thread_time() - began < 2 * slowness()
