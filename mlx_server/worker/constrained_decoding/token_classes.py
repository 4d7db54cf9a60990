"""Classifies a vocabulary's tokens by their effect on an ending (see grammar_completion.py).

A mask may allow 100,000 tokens, and to ask the matcher about each would take longer than the model.
Tokens of the same characters have the same effect: in a JSON text ` Paris` and ` Lyon` leave its
ending as it is, `",` and `."` may end it, and each `[[` or `{"` makes the ending longer. So a token
has a kind, a bit for each sort of character in it, and one token of a kind (three of a large one)
is asked for all of them. What the bits can't tell is left to a reserve of a few tokens.
"""

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
Ids = NDArray[np.intp]

WORD = 32

CLOSERS = b"} ] ) }} ]} }] ]] }) ]) )] }}} ]}} }]}".split()
QUOTES = [b'"', b"'"]
SHORT_VALUES = [b"null", b"0", b"true", b"false", b'""', b"[]", b"{}", b"None", b"True", b"''"]
MOST_BYTES = 24
"""Longer tokens are not used where a text is cut into tokens."""
PROSE = [b"q", b"~", b"7"]
"""Tokens that show free text: where all of them may follow, brackets mean nothing to the
grammar."""

SAMPLES = [bytes([byte]) for byte in b"q7@. -:/_A"]
"""Tokens that show that no pattern restricts a text: it may end after any of them."""

AFTER = b", } ] ) < | \n ' ; &".split(b" ")
"""Texts that may follow a complete value."""

PRINTABLE = [
    bytes([byte]) for byte in (*b"aA01", *(byte for byte in range(32, 127) if byte not in b"aA01"))
]


class Grouping:
    """Divides a vocabulary's tokens into groups."""

    def __init__(self, groups: NDArray[np.int64], usable: NDArray[np.bool_]) -> None:
        """groups: the number of each token's group."""
        order = np.argsort(groups, kind="stable")
        self._order = order[usable[order]]
        self._groups = groups

    def of(self, mask: Mask) -> list[Ids]:
        """Returns the tokens that a mask allows in their groups."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little").view(np.bool_)
        order = (
            self._order if len(bits) >= len(self._groups) else self._order[self._order < len(bits)]
        )
        ids = order[bits[order]]
        edges = np.flatnonzero(np.diff(self._groups[ids])) + 1
        return np.split(ids, edges) if len(ids) else []


class TokenClasses:
    """The classes of a vocabulary's tokens. Made once for a model."""

    def __init__(
        self, texts: Sequence[bytes], stop_tokens: Sequence[int], control: Collection[int]
    ) -> None:
        """texts: the bytes of each token. control: control tokens; it may include stop tokens."""
        apart = self.apart = {*control, *stop_tokens}
        self.texts = texts
        self.stop = stop_tokens[0]
        self.stops = sorted(stop_tokens)
        self.control = np.array(sorted(apart - {*stop_tokens}), dtype=np.intp)
        self.usable = np.zeros(max(len(texts), *self.stops, 0) + WORD, dtype=np.bool_)
        self.usable[: len(texts)] = True
        self.usable[self.stops] = False
        self.ids = {
            text: id for id, text in reversed(list(enumerate(texts))) if text and id not in apart
        }
        self._sizes = _sizes(self.ids)
        self.printable = {text[0]: self.ids[text] for text in PRINTABLE if text in self.ids}
        """The tokens of single printable characters, by their bytes."""
        self.first = [text[0] if text and id not in apart else -1 for id, text in enumerate(texts)]
        """The first byte of each token."""
        self.size = np.array([len(text) for text in texts], dtype=np.int64)
        self.ink = np.zeros(len(self.usable), dtype=np.int64)
        """The size of each token's text without the blanks before it, 0 for control tokens."""
        self.ink[: len(texts)] = [len(t.lstrip()) * (id not in apart) for id, t in enumerate(texts)]
        self.kind = _kinds(texts)
        self.kind[self.control] = -1 - np.arange(len(self.control))
        self.opens = ((self.kind < 0) | (self.kind & _OPENING != 0)).tolist()
        """Whether a token may lead into or out of a text."""
        self.by_kind = Grouping(self.kind, self.usable)
        marks = np.where(self.kind < 0, self.kind, self.kind & _MARKS_ONLY)
        self.by_marks = Grouping(marks, self.usable)
        self.exits, exits = _exits(texts, self.kind)
        """The tokens that end a quoted text."""
        self.by_exit = Grouping(np.where(exits > 0, -len(texts) - exits, marks), self.usable)
        """Groups for a quoted text that may end after any character: what a token has before its
        quote does not matter there."""
        self.plain = self._plain()
        self.closers = self.known(sorted(CLOSERS, key=len, reverse=True))
        self.quotes = self.known(QUOTES)
        self.after = [*self.known(AFTER), self.stop]
        self.comma = self.known([b","])
        self.single = self.known(PRINTABLE)
        self.prose = self.known(PROSE)
        self.samples = self.known(SAMPLES)
        self.fillers = self._fillers()

    def allowed(self, mask: Mask) -> Ids:
        """Returns the tokens that a mask allows, without stop tokens."""
        words = np.flatnonzero(mask)
        bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little")
        at = np.flatnonzero(bits)
        ids: Ids = words[at >> 5] * 32 + (at & 31)
        return ids[self.usable[ids]]

    def _plain(self) -> Mask:
        """Returns a mask of the tokens that stay inside a JSON text: whole characters without
        quotes, backslashes and line ends."""
        plain = (self.kind >= 0) & (self.kind & _MARKED == 0) & (self.kind != 0)
        flags = np.zeros(-(-len(self.usable) // WORD) * WORD, dtype=np.bool_)
        flags[: len(plain)] = plain & self.usable[: len(plain)]
        return np.packbits(flags, bitorder="little").view(np.int32)

    def cut(self, text: bytes) -> list[int]:
        """Cuts a text into tokens greedily, longest first; [] if the vocabulary can't spell it."""
        found: list[int] = []
        at, ids = 0, self.ids
        while at < len(text):
            for size in self._sizes.get(text[at : at + 2], _ONE_BYTE):
                if (id := ids.get(text[at : at + size])) is not None:
                    break
            else:
                return []
            found.append(id)
            at += len(self.texts[id])
        return found

    def without(self, tokens: list[int], size: int) -> list[int]:
        """Returns the tokens without their first bytes, up to a control token."""
        for at, token in enumerate(tokens):
            if not size or token in self.apart:
                return tokens[at:]
            if size < len(self.texts[token]):
                return [*self.cut(self.texts[token][size:]), *tokens[at + 1 :]]
            size -= len(self.texts[token])
        return []

    def after_text(self, tokens: list[int]) -> list[list[int]]:
        """Returns what follows the tokens' first quote, without it and with it."""
        for at, token in enumerate(tokens):
            text = b"" if token in self.apart else self.texts[token]
            if (quote := text.find(b'"')) >= 0:
                rest = tokens[at:]
                return [self.without(rest, quote + 1), self.without(rest, quote)]
        return []

    def text_of(self, token: int) -> bytes:
        """Returns a token's text, which is empty for a control token."""
        return b"" if token in self.apart or token >= len(self.texts) else self.texts[token]

    def bytes_of(self, token: int) -> int:
        """Returns the size of a token's text in bytes, 0 for a control token."""
        return len(self.text_of(token))

    def missing(self, token: int) -> int:
        """Returns the number of bytes that the last character of a token's text lacks."""
        kind = int(self.kind[token]) if token < len(self.kind) else 0
        return max(0, (kind & 15) - 4) if kind > 0 else 0

    def ends_with_escape(self, token: int) -> bool:
        text = self.texts[token] if self.bytes_of(token) else b""
        return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1

    def known(self, texts: Iterable[bytes]) -> list[int]:
        return [self.ids[text] for text in texts if text in self.ids]

    def _fillers(self) -> list[int]:
        """Returns plain words of each length, the longest first: enough for any required text."""
        words: dict[int, int] = {}
        for text, id in self.ids.items():
            if text.isalpha() and text.isascii():
                words.setdefault(len(text), id)
        return [words[size] for size in sorted(words, reverse=True)]


_ONE_BYTE = (1,)


def _sizes(texts: Iterable[bytes]) -> dict[bytes, list[int]]:
    """Returns the sizes of the texts that begin with each two bytes, the longest first, and 1."""
    found: dict[bytes, set[int]] = {}
    for text in texts:
        if 1 < len(text) <= MOST_BYTES:
            found.setdefault(text[:2], {1}).add(len(text))
    return {beginning: sorted(sizes, reverse=True) for beginning, sizes in found.items()}


_MARKS = [b'"', b"\\", b"{}", b"[]", b",", b":", b"<>", b"'()`", b"\n\r\t\x0b"]
_MARKED = (1 << 0 | 1 << 1 | 1 << 8) << 4 | 15
"""The bits of quotes, backslashes, line ends and incomplete characters."""
_QUOTED = 1 << 0 << 4
"""The bit of double quotes."""
_ENDS_A_TEXT = frozenset(b"'\\\n\r\t\x0b")
"""What may end or change a quoted text, besides a double quote."""
_OPENING = (1 << 0 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6 | 1 << 7) << 4
"""The bits of quotes, backslashes and brackets of all kinds."""
_MARKS_ONLY = (1 << len(_MARKS)) - 1 << 4 | 15
"""The bits of all marks and of incomplete characters: in free text, letters, digits and spaces have
the same effect."""


_PLAIN = [str.isalpha, str.isdigit, str.isspace]


def _plain_bits(text: str) -> int:
    """Returns the bits of letters, digits and white space."""
    if text.isalpha():
        return 1 << len(_MARKS)
    return sum(1 << len(_MARKS) + n for n, has in enumerate(_PLAIN) if any(map(has, text)))


def _bits(byte: int) -> int:
    """Returns the kinds of characters that a byte of a token shows by itself."""
    marks = sum(1 << n for n, mark in enumerate(_MARKS) if byte in mark)
    return (marks | _plain_bits(chr(byte))) << 4 if byte < 128 else _MULTIBYTE


_MULTIBYTE = 4
"""The bit of texts that are not ASCII."""
_BITS = np.array([_bits(byte) for byte in range(256)], dtype=np.int64)


def _kinds(texts: Sequence[bytes]) -> NDArray[np.int64]:
    """Returns which kinds of characters each token has, as bits: tokens with the same bits usually
    have the same effect on an ending."""
    sizes = np.array([len(text) for text in texts], dtype=np.int64)
    kinds = np.zeros(len(texts), dtype=np.int64)
    if not sizes.any():
        return kinds
    starts = (np.cumsum(sizes) - sizes)[sizes > 0]
    written = np.frombuffer(b"".join(texts), dtype=np.uint8)
    kinds[sizes > 0] = np.bitwise_or.reduceat(_BITS[written], starts)
    for id in np.flatnonzero(kinds & _MULTIBYTE).tolist():
        whole = texts[id].decode("utf-8", "ignore")
        kinds[id] |= _plain_bits(whole) << 4
        if whole.encode() != texts[id]:
            kinds[id] += next((n for n in range(1, 4) if _opens(texts[id], n)), 0)
    return kinds


def _exits(
    texts: Sequence[bytes], kind: NDArray[np.int64]
) -> tuple[AbstractSet[int], NDArray[np.int64]]:
    """Returns the tokens that have plain characters and then a double quote, and for each token a
    number of its text from there on, 0 for the others."""
    numbers: dict[bytes, int] = {}
    found = np.zeros(len(texts), dtype=np.int64)
    for id in np.flatnonzero((kind > 0) & (kind & _QUOTED != 0)).tolist():
        before, quote, after = texts[id].partition(b'"')
        if quote and not _ENDS_A_TEXT.intersection(before):
            found[id] = numbers.setdefault(after, len(numbers) + 1)
    return frozenset(np.flatnonzero(found).tolist()), found


def _opens(text: bytes, missing: int) -> bool:
    """Whether `missing` bytes of the last character of a UTF-8 text are yet to come."""
    for size in (2, 3, 4):
        have = size - missing
        if 0 < have <= len(text) and 256 - (256 >> size) <= text[-have] < 256 - (128 >> size):
            return True
    return False
