"""What a piece of prefill costs on this machine with this model, learned from the latest pieces.

A piece takes a constant time, which is large where a piece reads most experts of a model whatever
its size; a time for each of its tokens; and a time for each token and each token before it, which
attention takes. The three are fitted to what was measured, none of them below zero.
"""

from collections import deque
from dataclasses import dataclass
from itertools import product
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

MEASURED = 24
"""Pieces; older ones are forgotten,"""
FADING = 0.9
"""... and of these each counts for less than the one after it."""

PRIOR = (0.1, 0.0, 0.03)
"""How far each of the three is held down where pieces of one size tell them not apart: what is put
down to the tokens can only turn out to be cheaper."""

FIRST = 32
"""Tokens of the first piece, of whose cost nothing is known."""
GROWTH = 2
"""A piece is at most so many times as large as the largest that was measured, and no larger than it
would be if nothing of that one's time were constant."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class PrefillPiece:
    rows: int
    length: int
    """Tokens of each of its rows."""
    context: int
    """Tokens before it, of each row."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def causes(self) -> tuple[float, float, float]:
        return 1.0, float(self.tokens), self.tokens * (self.context + self.length / 2)


class PrefillCost:
    def __init__(self) -> None:
        self._measured: deque[tuple[PrefillPiece, float]] = deque(maxlen=MEASURED)
        self._sizes: set[int] = set()
        """The least and the most tokens of a piece so far."""
        self._cost = np.zeros(3)
        """Seconds of a piece, of a token, and of a token for each one before it."""

    def learn(self, piece: PrefillPiece, seconds: float) -> None:
        self._measured.append((piece, max(seconds, 1e-9)))
        sizes = {*self._sizes, piece.tokens}
        self._sizes = {min(sizes), max(sizes)}
        self._cost = self._fitted()

    def seconds(self, piece: PrefillPiece) -> float:
        return float(np.dot(self._cost, piece.causes))

    def tokens(self, seconds: float, rows: int, context: int) -> int:
        """How many tokens of all rows together a piece has that takes so long."""
        if not self._measured:
            return FIRST
        each, more = self._cost[1] + self._cost[2] * context, self._cost[2] / (2 * rows)
        left = seconds / self._slower - self._cost[0]
        # the positive root of more * tokens ** 2 + each * tokens = left
        root = each + sqrt(each**2 + 4 * more * max(0.0, left))
        fitting = 2 * left / root if root > 0 else inf
        return int(max(0.0, min(fitting, self._tried(seconds))))

    def _tried(self, seconds: float) -> float:
        """Tokens of a piece that can't take longer, if the largest that was measured did not."""
        largest, took = max(self._measured, key=lambda measured: measured[0].tokens)
        return largest.tokens * max(1.0, min(GROWTH, seconds / took))

    @property
    def useful(self) -> int:
        """Tokens of a piece of which half of the time goes to its tokens."""
        return int(self._cost[0] / self._cost[1]) if self._cost[1] > 0 else 0

    @property
    def knows_one_size(self) -> bool:
        """Of all pieces so far, which were several."""
        return len(self._measured) > 2 and len(self._sizes) == 1

    @property
    def _slower(self) -> float:
        """How much longer the last piece took than it should have: a machine that gets slower is
        followed at once."""
        piece, seconds = self._measured[-1]
        return max(1.0, seconds / max(self.seconds(piece), 1e-12))

    def _fitted(self) -> Vector:
        """Least squares of the relative errors; of the signs that are allowed, the best."""
        ages = range(len(self._measured) - 1, -1, -1)
        weights = np.array([FADING**age for age in ages])
        causes = np.array([piece.causes for piece, _ in self._measured])
        causes /= np.array([[seconds] for _, seconds in self._measured])
        largest = causes.max(axis=0)
        known = np.vstack([causes / largest * weights[:, None], np.diag(PRIOR)])
        wanted = np.concatenate([weights, np.zeros(3)])
        best, least = np.zeros(3), inf
        for chosen in product((False, True), repeat=3):
            if not any(chosen):
                continue
            found = np.zeros(3)
            found[list(chosen)] = np.linalg.lstsq(known[:, list(chosen)], wanted, rcond=None)[0]
            error = float(np.sum((known @ found - wanted) ** 2))
            if found.min() >= 0 and error < least:
                best, least = found, error
        fitted: Vector = best / largest
        return fitted
