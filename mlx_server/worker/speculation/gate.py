"""Decides how many tokens of each row's draft a pass computes: as many as make the pass give more
tokens a second, by what it costs on this machine and by how often such drafts were right."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_server.worker.costs import MOST_ROWS, CostCurve
from mlx_server.worker.speculation.draft import Draft, Kind

MOST_DRAFTED = 63
"""The most tokens of a draft: from 64 positions on, most models' experts are read once for all."""

ENTER, STAY = 1.08, 1.05
"""A pass with drafts has to give so many times the tokens a second of one without: the first such
pass, and further ones."""

LAUNCH = 0.05
"""The share by which a pass with drafts takes longer, since it is not launched before the last
token is known."""

SLOWEST = 0.95
"""No row gets less than this share of the tokens a second that it has without drafts: not in a
pass, unless it got more by those before."""

PACE_FADE, MOST_PACE = 0.85, 4.0
"""How much of a row's pace is left after a further pass, and the most that one counts for."""

MODEL_FADE, ROW_FADE = 0.995, 0.9
"""How much of what was learnt is left after a further token of a kind."""

MODEL_WEIGHT, ROW_WEIGHT = 3.0, 8.0
"""How many compared tokens the assumption of a table counts for: for a row what is known of the
model, and for the model these:"""

TRUSTED = {"prediction": 0.9, "prediction, resumed": 0.6}


def assumed(kind: Kind) -> float:
    """Returns how often a drafted token is right, before any is compared."""
    return TRUSTED.get(kind.source, 0.0) or (kind.match + 1) / (kind.match + 3)


LEAST_CHANCE = 0.02
"""Tokens that are right less often are not considered."""


SIMILAR = (1, 2, 3, 4, 6, 10, 20)
"""Matches of lengths between two of these are counted together."""

Bucket = tuple[str, int]


def _bucket(kind: Kind) -> Bucket:
    return kind.source, bisect_right(SIMILAR, kind.match)


class Acceptance:
    """How often drafted tokens were right, by their kind, if all before them were."""

    def __init__(self, assumed: Callable[[Kind], float], weight: float, fade: float) -> None:
        self._assumed, self._weight, self._fade = assumed, weight, fade
        self._counts: dict[Bucket, tuple[float, float]] = {}
        """Tokens that were right, and those that were compared."""

    def chance(self, kind: Kind) -> float:
        right, compared = self._counts.get(_bucket(kind), (0.0, 0.0))
        return (right + self._weight * self._assumed(kind)) / (compared + self._weight)

    def learn(self, kind: Kind, is_right: bool) -> None:
        bucket = _bucket(kind)
        right, compared = self._counts.get(bucket, (0.0, 0.0))
        self._counts[bucket] = self._fade * right + is_right, self._fade * compared + 1

    def chances(self, draft: Draft) -> list[float]:
        """Returns for each token of a draft how likely it and all before it are right."""
        chances, chance = list[float](), 1.0
        for at in range(len(draft.tokens)):
            chance *= self.chance(draft.kind(at))
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return chances


class Gate:
    """Decides whether drafts of one model pay, and keeps what it has learnt while the model is
    loaded."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._most: dict[int, int] = {}
        self.acceptance = Acceptance(assumed, MODEL_WEIGHT, MODEL_FADE)
        self._drafting = False
        """Whether the last pass computed drafts."""

    @property
    def is_known(self) -> bool:
        """Whether the curve says what more tokens cost; if not, there are no drafts."""
        return not self._curve.is_flat

    def use(self, curve: CostCurve) -> None:
        """Decides by another curve from now on."""
        self._curve, self._most = curve, {}

    def row(self) -> Acceptance:
        """Returns what is learnt of one row, at first what is known of the model."""
        return Acceptance(self.acceptance.chance, ROW_WEIGHT, ROW_FADE)

    def most(self, rows: int) -> int:
        """Returns the most tokens to draft for each of so many rows: none where a pass would not
        even pay if all of them were right."""
        if rows not in self._most:
            drafted = np.arange(1, max(0, min(MOST_DRAFTED * rows, MOST_ROWS - rows)) + 1)
            costs = self._costs(rows, len(drafted))
            pays = (rows + drafted) / costs[1:] > ENTER * rows / costs[0]
            self._most[rows] = MOST_DRAFTED if pays.any() else 0
        return self._most[rows]

    def widths(
        self, drafts: Sequence[Draft | None], extra: float = 0.0, *, launched: bool = True
    ) -> list[int]:
        """Returns how many tokens of each row's draft the pass computes.

        drafts: of the rows of the pass. extra: what reading their keys and values costs, in the
        unit of the curve. launched: whether a pass without drafts would be launched ahead.
        """
        rows = len(drafts)
        widths = [0] * rows
        # each row's chances fall, so the tokens of a row are taken in their order
        candidates = sorted(
            (-chance, at, row)
            for row, draft in enumerate(drafts)
            if draft
            for at, chance in enumerate(draft.chances)
        )[: max(0, MOST_ROWS - rows)]
        if not candidates:
            self._drafting = False
            return widths
        gains = np.zeros((len(candidates) + 1, rows))
        taken = [row for *_, row in candidates]
        gains[np.arange(1, len(candidates) + 1), taken] = [-chance for chance, *_ in candidates]
        tokens = 1 + np.cumsum(gains, axis=0)
        costs = self._costs(rows, len(candidates), extra, LAUNCH if launched else 0.0)
        rates = tokens.sum(axis=1) / costs * (costs[0] / rows)
        paces = [draft.pace if draft else 1.0 for draft in drafts]
        slowest = np.maximum(tokens, paces).min(axis=1) / costs * costs[0]
        rates[slowest < SLOWEST] = 0
        best = int(np.argmax(rates))
        self._drafting = best > 0 and rates[best] > (STAY if self._drafting else ENTER)
        for row in taken[:best] if self._drafting else ():
            widths[row] += 1
        return widths

    def _costs(
        self, rows: int, drafted: int, extra: float = 0.0, launch: float = 0.0
    ) -> NDArray[np.float64]:
        """Returns the costs of passes with so many drafted tokens and fewer, from 0 on."""
        at = np.minimum(np.arange(rows, rows + drafted + 1), MOST_ROWS)
        costs: NDArray[np.float64] = self._curve.least[at] + extra
        costs[1:] *= 1 + launch
        return costs
