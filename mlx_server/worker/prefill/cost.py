"""Predicts the time of a piece of prefill on this machine and model from the latest pieces.

A piece takes a constant time, which is large where any piece reads most experts of a model; a time
for each of its tokens; and attention's time for each pair of a token and one before it. The three
coefficients are fitted to the measured times, none of them below zero.
"""

from collections import deque
from dataclasses import dataclass
from itertools import product
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

MEASURED = 24
"""The number of latest pieces to which the cost is fitted."""
FADING = 0.9
"""The weight of a piece relative to the one after it."""

PRIOR = (0.1, 0.0, 0.03)
"""The penalty on each coefficient, which decides where pieces of one size can't separate them: time
that is attributed to the tokens can only turn out to be shorter."""

FIRST = 32
"""Tokens of the first piece, whose cost is unknown."""
GROWTH = 2
"""A piece is at most this many times as large as the largest measured one, and no larger than it
would be if that one's time were proportional to its tokens."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class PrefillPiece:
    rows: int
    length: int
    """Tokens of each row in this piece."""
    context: int
    """Tokens of each row before this piece."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def causes(self) -> tuple[float, float, float]:
        return 1.0, float(self.tokens), self.tokens * (self.context + self.length / 2)


class PrefillCost:
    def __init__(self) -> None:
        self._measured: deque[tuple[PrefillPiece, float]] = deque(maxlen=MEASURED)
        self._largest = 0, 0.0
        """The tokens of the largest piece so far, and its seconds when it was last computed. Short
        prompts do not make it smaller, so that many at once need not begin with small pieces."""
        self._sizes: set[int] = set()
        """The smallest and the largest number of tokens of a piece so far."""
        self._cost = np.zeros(3)
        """Seconds for a piece, for each token, and for each pair of a token and one before it."""

    def learn(self, piece: PrefillPiece, seconds: float) -> None:
        self._measured.append((piece, max(seconds, 1e-9)))
        if piece.tokens >= self._largest[0]:
            self._largest = piece.tokens, max(seconds, 1e-9)
        sizes = {*self._sizes, piece.tokens}
        self._sizes = {min(sizes), max(sizes)}
        self._cost = self._fitted()

    def seconds(self, piece: PrefillPiece) -> float:
        """Predicts the seconds of a piece. It takes at least as long for each token as the largest
        of the latest that had not much more context: a fit to the few pieces of short prompts may
        predict less."""
        most = piece.context + piece.length
        alike = [each for each in reversed(self._measured) if each[0].context <= most]
        if not alike:
            return self._predicted(piece)
        largest, took = max(alike, key=lambda measured: measured[0].tokens)
        return max(self._predicted(piece), took * piece.tokens / largest.tokens)

    def _predicted(self, piece: PrefillPiece) -> float:
        return float(np.dot(self._cost, piece.causes))

    def tokens(self, seconds: float, rows: int, context: int) -> int:
        """Returns how many tokens, of all rows together, a piece of `seconds` has."""
        if not self._measured:
            return FIRST
        each, more = self._cost[1] + self._cost[2] * context, self._cost[2] / (2 * rows)
        left = seconds / self._slower - self._cost[0]
        # This is the positive root of more * tokens ** 2 + each * tokens = left.
        root = each + sqrt(each**2 + 4 * more * max(0.0, left))
        fitting = 2 * left / root if root > 0 else inf
        return int(max(0.0, min(fitting, self._tried(seconds))))

    def _tried(self, seconds: float) -> float:
        """Returns a size that is safe to try, from the largest of the latest pieces and that of all
        pieces, whose time may be out of date."""
        piece, took = max(self._measured, key=lambda measured: measured[0].tokens)
        lately = piece.tokens * max(1.0, min(GROWTH, seconds / took))
        largest, took = self._largest
        return max(lately, largest * min(1.0, seconds / took))

    @property
    def useful(self) -> int:
        """The size of a piece whose constant time equals the time for its tokens."""
        return int(self._cost[0] / self._cost[1]) if self._cost[1] > 0 else 0

    @property
    def knows_one_size(self) -> bool:
        """Whether all pieces so far, which are several, had the same size."""
        return len(self._measured) > 2 and len(self._sizes) == 1

    @property
    def _slower(self) -> float:
        """The factor by which the last piece took longer than predicted, at least 1: the budget
        reacts at once to a machine that slows down."""
        piece, seconds = self._measured[-1]
        return max(1.0, seconds / max(self._predicted(piece), 1e-12))

    def _fitted(self) -> Vector:
        """Fits the coefficients by least squares of the relative errors: the best non-negative fit
        among all subsets of the coefficients."""
        ages = range(len(self._measured) - 1, -1, -1)
        weights = np.array([FADING**age for age in ages])
        causes = np.array([piece.causes for piece, _ in self._measured])
        causes /= np.array([[seconds] for _, seconds in self._measured])
        largest = causes.max(axis=0)
        known = np.vstack([causes / largest * weights[:, None], np.diag(PRIOR)])
        wanted = np.concatenate([weights, np.zeros(3)])
        best, least = np.zeros(3), inf
        for chosen in product((True, False), repeat=3):
            if not any(chosen):
                continue
            found = np.zeros(3)
            found[list(chosen)] = np.linalg.lstsq(known[:, list(chosen)], wanted, rcond=None)[0]
            error = float(np.sum((known @ found - wanted) ** 2))
            if found.min() >= 0 and error < least:
                best, least = found, error
            if all(chosen) and least < inf:
                break  # a subset of them fits no better
        fitted: Vector = best / largest
        return fitted
