"""Cuts texts for openai-harmony, whose time grows with the square of a word's length, and which
lets no other thread run."""

import re
from collections.abc import Iterator
from heapq import merge

from mlx_server.prompts.harmony.vocabulary import splitter
from mlx_server.request_threads import check_wanted

LONGEST_WORD = 256
"""Most characters without a token boundary. openai-harmony's time grows with their square."""

WINDOW = 1 << 14
"""Characters that are split into words at a time: each word takes hundreds of bytes."""

BEGIN_OF_WORD = re.compile(r"\S(?= [^\W_])|\n(?=[^\W_])")
"""Ends where a word surely begins, whatever is before it."""

LONG = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD}}}|(?<!\s)\s{{{LONGEST_WORD}}}")
"""Matches long runs only at their start, or each character would be tested hundreds of times."""


def text_pieces(text: str) -> Iterator[str]:
    """Yields the text in pieces of about WINDOW characters. They change no token, except within
    words that are longer than LONGEST_WORD."""
    begin = 0
    for place in merge(_within_long_words(text), _between_words(text)):
        if place > begin:
            yield text[begin:place]
            begin = place
    if text[begin:]:
        yield text[begin:]


def _within_long_words(text: str) -> Iterator[int]:
    for at, size in long_words(text):
        yield from range(at + LONGEST_WORD, at + size, LONGEST_WORD)


def _between_words(text: str) -> Iterator[int]:
    """Yields a place in each window where a word begins."""
    at = 0
    while len(text) - at > 2 * WINDOW:
        if found := BEGIN_OF_WORD.search(text, at + WINDOW, at + 2 * WINDOW):
            yield (at := found.end())
            continue
        words = splitter().pre_tokenize_str(text[at : at + WINDOW])
        # the last ones may go on after this part
        start: int = words[-3][1][0] if len(words) > 2 else 0
        if start:
            yield (at := at + start)
        else:
            at += WINDOW


def long_words(text: str) -> Iterator[tuple[int, int]]:
    """Yields start and length of each pre-tokenised word that is longer than LONGEST_WORD."""
    at = 0
    while at < len(text):
        check_wanted()
        part = _window(text, at)
        if LONG.search(part):
            for word, (start, _) in splitter().pre_tokenize_str(part):
                if len(word) > LONGEST_WORD:
                    yield at + start, len(word)
        at += len(part)


def _window(text: str, at: int) -> str:
    """Returns the next window of text, up to its last space, where a token can end, if it has
    one."""
    end = at + WINDOW
    space = text.rfind(" ", at + 1, end) if end < len(text) else -1
    return text[at : end if space < 0 else space]
