"""Drafts from earlier tokens: what followed the row's last tokens in the prompt, the answer or the
client's prediction."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_server.worker.speculation.draft import Draft

BLOCK_BITS = 16
BLOCK = 1 << BLOCK_BITS
"""The places that are sorted together: those of 65,536 tokens take some 3 ms."""
PLACES = 16
"""The most earlier places that are compared for a draft."""
MOST_MATCH = 32
"""The most tokens that are compared at a place."""
RESUMED = 4
"""After a mismatch, so many tokens have to be right until a place counts as before; and after so
many wrong ones it is given up."""
REACH = 24
"""How many tokens further a place is looked for after a deletion."""
SHORT = 3
"""The most tokens that are drafted from a place at which the last token was wrong."""


class PlaceIndex:
    """The places of keys in a sequence, newest first. A block is sorted by `read_block`, the last
    one first, so that no step waits until a long prompt is sorted."""

    def __init__(self, length: int) -> None:
        self._unread = list(range(0, length, BLOCK))
        self._blocks: list[tuple[int, NDArray[np.uint64]]] = []

    @property
    def next_block(self) -> int | None:
        """Where the block begins that is to be read next."""
        return self._unread[-1] if self._unread else None

    def read_block(self, keys: NDArray[np.uint64]) -> None:
        """keys: of each place of the next block, less than 2**48."""
        places = np.arange(len(keys), dtype=np.uint64)
        self._blocks.append((self._unread.pop(), np.sort(keys << np.uint64(BLOCK_BITS) | places)))

    def places(self, key: int) -> Iterator[int]:
        for begin, block in self._blocks:
            first = np.uint64(key << BLOCK_BITS)
            at = int(np.searchsorted(block, first + np.uint64(BLOCK - 1), side="right")) - 1
            while at >= 0 and block[at] >= first:
                yield begin + int(block[at]) % BLOCK
                at -= 1


class TokenLookup:
    """Finds the longest match of the row's last tokens among earlier places, the newest first; and
    goes on at a place after a mismatch."""

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int] | None = None) -> None:
        """prediction: what the drafts are taken from in place of the prompt and the answer."""
        self._name = "lookup" if prediction is None else "prediction"
        self._row = list(prompt)
        self._source = self._row if prediction is None else list(prediction)
        self._index = PlaceIndex(len(self._source))
        self._sorted = len(self._source)
        """The tokens of the source that the index has; the others were generated since."""
        self._generated: dict[tuple[int, int], list[int]] = {}
        self._at: int | None = None if prediction is None else 0
        """The place of the next token, if the row goes on as it does there."""
        self._match = self._wrong = 0
        self._right = RESUMED if prediction is None else 0

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._at is not None:
                self._follow(self._at, token)
            self._row.append(token)
            if self._source is self._row and len(self._row) > 2:
                first, second = self._row[-3:-1]
                self._generated.setdefault((first, second), []).append(len(self._row) - 1)

    def _follow(self, at: int, token: int) -> None:
        source = self._source
        if at < len(source) and source[at] == token:
            self._at, self._wrong = at + 1, 0
            self._match += 1
            self._right += 1
            return
        self._wrong += 1
        self._match, self._right = 1, 0
        if self._wrong == 1:
            self._at = at + 1  # as if a token was replaced
        elif token in (window := source[at : at + REACH]):
            self._at = at + window.index(token) + 1
        elif self._wrong > RESUMED:
            self._at = None

    def draft(self, most: int) -> Draft | None:
        self._read_block()
        self._find()
        if self._at is None or self._at >= len(self._source):
            return None
        resumed = self._right < RESUMED and self._match < MOST_MATCH // 2
        if resumed and self._source is self._row:
            most = min(most, SHORT)
        name = f"{self._name}, resumed" if resumed else self._name
        tokens = self._source[self._at : self._at + most]
        return Draft(tokens, name, self._match) if tokens else None

    def follower(self, tokens: Sequence[int]) -> int | None:
        """Returns what followed the last two tokens of the row and these ones, the latest time."""
        first, second = [*self._row[-2:], *tokens][-2:] if len(self._row) > 1 else (-1, -1)
        place = next(self._places(first, second), None)
        return None if place is None else self._source[place]

    def _find(self) -> None:
        """Goes to another place if more of the row's last tokens are there."""
        row, source = self._row, self._source
        if self._match >= MOST_MATCH or len(row) < 2:
            return
        for count, place in enumerate(self._places(*row[-2:])):
            match = 2
            longest = min(MOST_MATCH, place, len(row))
            while match < longest and source[place - 1 - match] == row[-1 - match]:
                match += 1
            if match > self._match or self._at is None:
                self._at, self._match, self._wrong, self._right = place, match, 0, RESUMED
            if match >= MOST_MATCH or count >= PLACES:
                return

    def _places(self, first: int, second: int) -> Iterator[int]:
        yield from reversed(self._generated.get((first, second), ()))
        if first >= 0 and max(first, second) < 1 << 24:  # others are a picture's
            yield from (
                place + 2
                for place in self._index.places(first << 24 | second)
                if place + 2 < self._sorted
            )

    def _read_block(self) -> None:
        begin = self._index.next_block
        if begin is not None:
            ids = self._source[begin : min(begin + BLOCK + 1, self._sorted)]
            keys = np.array(ids, np.uint64)
            self._index.read_block(keys[:-1] << np.uint64(24) | keys[1:])
