"""Classifies a vocabulary's tokens by their effect on an ending (see grammar_completion.py)."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
Ids = NDArray[np.intp]

WORD = 32

CLOSERS = b"} ] ) }} ]} }] ]] }) ]) )] }}} ]}} }]}".split()
QUOTES = [b'"', b"'"]
SHORT_VALUES = [b"null", b"0", b"true", b"false", b'""', b"[]", b"{}", b"None", b"True", b"''"]
PROSE = [b"q", b"~", b"7"]
"""Where all of these may follow, the grammar reads free text and brackets mean nothing."""

DEAR = {ord("["): 2, ord("{"): 4, ord("\\"): 4, ord(","): 1, ord("-"): 1, ord(" "): 1, ord("\n"): 2}
"""The costs of bytes that lead away from an end."""

LETTER, CAPITAL, DIGIT, BEYOND, BLANK, SPACED = range(256, 262)
"""How a token begins, if not with ASCII punctuation, which is its own byte. BEYOND: not ASCII."""

STARTS = 264
"""A bound above all of these values and all bytes."""


class TokenClasses:
    """The classes of a vocabulary's tokens. Made once for a model."""

    def __init__(
        self, texts: Sequence[bytes], stop_tokens: Sequence[int], control: Collection[int]
    ) -> None:
        """texts: the bytes of each token. control: control tokens; it may include stop tokens."""
        apart = {*control, *stop_tokens}
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
        self.size = np.array([len(text) for text in texts])
        self.start = np.array([_start(text) for text in texts])
        self.start[self.control] = -1 - np.arange(len(self.control))
        self.kind = np.array([_kind(text) for text in texts])
        self.kind[self.control] = -1 - np.arange(len(self.control))
        self.closers = self._known(sorted(CLOSERS, key=len, reverse=True))
        self.quotes = [
            (self.ids[quote], self._known([quote + text for text in [*CLOSERS[::-1], b""]]))
            for quote in QUOTES
            if quote in self.ids
        ]
        self.cost = np.array([_cost(text) for text in texts])
        # Of a pair of control tokens, the closing one usually has the higher id: it is cheaper.
        self.cost[self.control] = -64 - np.arange(len(self.control)) % 64
        self.after = [*self._known([b",", b"}", b"]", b")"]), self.stop]
        self.colon = self._known([b":"])
        self.parting = self._known([b',"', b","])
        self.single = self._known(bytes([byte]) for byte in range(33, 127))
        self.linking = [b":" in text or b"," in text for text in texts]
        self.small = self._known(SHORT_VALUES)
        self.prose = self._known(PROSE)
        self.fillers = self._fillers()

    def allowed(self, mask: Mask) -> Ids:
        """Returns the tokens that a mask allows, without stop tokens."""
        words = np.flatnonzero(mask)
        bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little")
        at = np.flatnonzero(bits)
        ids: Ids = words[at >> 5] * 32 + (at & 31)
        return ids[self.usable[ids]]

    def cut(self, text: bytes) -> list[int]:
        """Cuts a text into tokens greedily, longest first; [] if the vocabulary can't spell it."""
        found: list[int] = []
        while text:
            size = next((n for n in range(min(len(text), 24), 0, -1) if text[:n] in self.ids), 0)
            if not size:
                return []
            found.append(self.ids[text[:size]])
            text = text[size:]
        return found

    def _known(self, texts: Iterable[bytes]) -> list[int]:
        return [self.ids[text] for text in texts if text in self.ids]

    def _fillers(self) -> Ids:
        """Returns the shortest and the longest tokens of each beginning: enough for any text."""
        own = np.array(sorted(self.ids.values()), dtype=np.intp)
        order = own[np.argsort(self.size[own], kind="stable")]
        ends: list[Ids] = [self.control]
        for start in np.unique(self.start[own]):
            same = order[self.start[order] == start]
            ends += [same[:40], same[-4:]]
        return np.unique(np.concatenate(ends))


def _cost(text: bytes) -> int:
    """Returns a token's cost as filler text: cheap ones, and of these long ones, come first."""
    cost = sum(DEAR.get(byte, 0) for byte in text[:8]) if text.strip() else 8
    if text[:1] in b'":':
        cost += sum(byte in b"().-/'" for byte in text)
    return 64 * cost - min(len(text), 20)


def _start(text: bytes) -> int:
    """Returns how a token begins: the byte of an ASCII punctuation mark, or one of the classes."""
    first = text[:1]
    if not text.strip():
        return BLANK
    if first.isspace():
        return SPACED
    if first.isdigit():
        return DIGIT
    if first.isalpha():
        return LETTER if first.islower() else CAPITAL
    return first[0] if first[0] < 128 else BEYOND


def _kind(text: bytes) -> int:
    """Returns which kinds of characters a token has, as bits: tokens with the same bits usually
    have the same effect on an ending."""
    marks = [b'"', b"\\", b"{}", b"[]", b",", b":", b"<>", b"'()`", b"\n\r\t\x0b"]
    kind = sum(1 << n for n, mark in enumerate(marks) if any(byte in mark for byte in text))
    plain = [str.isalpha, str.isdigit, str.isspace]
    whole = text.decode("utf-8", "ignore")
    kind |= sum(1 << (9 + n) for n, has in enumerate(plain) if any(map(has, whole)))
    missing = 4 if not text.isascii() else 0
    if missing:
        missing += next((n for n in range(1, 4) if _opens(text, n)), 0)
    return kind << 4 | missing


def _opens(text: bytes, missing: int) -> bool:
    """Whether `missing` bytes of the last character of a UTF-8 text are yet to come."""
    for size in (2, 3, 4):
        have = size - missing
        if 0 < have <= len(text) and 256 - (256 >> size) <= text[-have] < 256 - (128 >> size):
            return True
    return False
