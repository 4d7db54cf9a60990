"""Finds out that a model repeats the same text without end."""

import re
from collections import deque

LONGEST_PERIOD = 1_024
"""The most tokens of a text whose repeats are noticed."""

CONTEXT = 32
"""The tokens that have to recur before a period is assumed. With fewer, repeats within the period
would be taken for it."""

LEAST, LEAST_OF_DATA = 256, 700
"""The tokens that one repeat counts at least: short texts are repeated more often for good reasons,
most of all data such as zeros."""

FEW = 8
"""The different tokens of a period up to which it is taken for data."""

PRIME = (1 << 61) - 1
BASE = 1_000_003
LEAVING = pow(BASE, CONTEXT, PRIME)
"""The factor of the token that leaves the context in its hash, a polynomial of the tokens."""


CATCHING_UP = 3
"""How many of the first tokens of an answer are read for each later one."""


class LoopDetector:
    """The tokens of one answer, each of which takes constant time.

    Loops are long, so the first tokens are read late: an answer that ends before takes no time.

    A period is assumed where the last tokens came before, and holds for as long as each further
    token equals the one a period earlier.
    """

    def __init__(self, repeats: int) -> None:
        """repeats: how often in a row the same tokens have to come."""
        self.period = 0
        """The number of tokens that are being repeated; 0 if there are none."""
        self.repeats = repeats
        self._late: deque[int] = deque()
        """The tokens that are not read yet."""
        self._run = 0
        """The tokens of all repeats so far."""
        self._count = 0
        self._tokens = [-1] * (LONGEST_PERIOD + CONTEXT)
        """The last tokens, as a ring."""
        self._hash = 0
        """The hash of the last `CONTEXT` tokens."""
        self._hashes = [0] * LONGEST_PERIOD
        """The last hashes, as a ring."""
        self._seen: dict[int, int] = {}
        """The place at which each of these hashes was seen last."""

    def add(self, token: int) -> bool:
        """Returns whether the answer is in a loop with this token."""
        if self._count and not self._late:
            return self._read(token)
        self._late.append(token)
        is_loop = False
        if self._count or len(self._late) >= self.repeats * LEAST // 2:
            for _ in range(min(CATCHING_UP, len(self._late))):
                is_loop = self._read(self._late.popleft())
        return is_loop

    def _read(self, token: int) -> bool:
        if self.period and self._token(self.period) == token:
            self._run += 1
        else:
            self.period = 0
        self._remember(token)
        return self.period > 0 and self._run >= self.repeats * max(self.period, self._least())

    @property
    def room(self) -> int:
        """How many tokens can be added without a loop, whatever they are."""
        if self._late:
            return max(0, self.repeats * LEAST - 1 - self._count - len(self._late))
        room = (self.repeats - 1) * LEAST - CONTEXT  # if another period begins
        if self.period:
            room = min(room, self.repeats * max(self.period, LEAST) - self._run - 1)
        return max(0, room)

    def _token(self, distance: int) -> int:
        return self._tokens[(self._count - distance) % len(self._tokens)]

    def _remember(self, token: int) -> None:
        leaves = self._token(CONTEXT) + 1
        self._hash = (self._hash * BASE + token + 1 - leaves * LEAVING) % PRIME
        self._tokens[self._count % len(self._tokens)] = token
        self._count += 1
        if self._count < CONTEXT:
            return
        oldest = self._hashes[self._count % LONGEST_PERIOD]
        if self._seen.get(oldest) == self._count - LONGEST_PERIOD:
            del self._seen[oldest]
        if not self.period and (seen := self._seen.get(self._hash)):
            self.period = self._count - seen
            self._run = self.period + CONTEXT
        self._hashes[self._count % LONGEST_PERIOD] = self._hash
        self._seen[self._hash] = self._count

    def _least(self) -> int:
        if self._run < self.repeats * LEAST or self._run >= self.repeats * LEAST_OF_DATA:
            return LEAST
        different = {self._token(1 + back) for back in range(self.period)}
        return LEAST if len(different) > FEW else LEAST_OF_DATA


WORD = re.compile(r"\s?\w{1,12}|\s{1,12}|[^\w\s]{1,4}")
"""Mostly longer than a token, and with the white space before it, so that no text is ended sooner
than one whose tokens are known."""


class TextLoopDetector:
    """The text of one answer, whose words stand for the tokens that nobody has sent."""

    def __init__(self, repeats: int) -> None:
        self._loops = LoopDetector(repeats)
        self._rest = ""
        """The end of the text, which may be the beginning of a word."""

    @property
    def period(self) -> int:
        return self._loops.period

    def add(self, text: str) -> bool:
        """Returns whether the answer is in a loop with this text."""
        *words, self._rest = WORD.findall(self._rest + text) or [""]
        return any(self._loops.add(hash(word) % PRIME) for word in words)
