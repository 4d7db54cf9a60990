"""How much of a prompt to compute before the rows that decode have their next token.

On a GPU a step costs nearly the same for one row as for eight, and a small piece of prefill reads
nearly as many weights as a large one. So a piece is as long as streams may wait; after it come
steps until prefill has had no more than its share of the time.
"""

from mlx_server.engine.messages import Schedule
from mlx_server.worker.prefill.cost import PrefillCost, PrefillPiece

IDLE_SECONDS = 0.5
"""A piece with nobody waiting for tokens: short enough to notice a cancel or a newcomer soon."""

LEAST, MOST = 32, 2048
"""Tokens of a piece. mlx-lm cuts longer ones."""
MOST_USEFUL = 512
"""... but one that reads all of a model for a few tokens is made as long as this, if need be."""

SAVED_SECONDS = 1.0
"""Of steps that are owed, while several prompts wait."""

MARGIN = 1.07
"""More steps than are owed: the last piece of a prompt is paid for when the prompt has ended."""

DEAREST = 1000.0
"""Seconds of steps for one of prefill, where its share is next to nothing."""

STEP_EVERY = 16
"""So many rounds with a single step are followed by one with two: the second shows how long a step
takes by itself."""


class PrefillBudget:
    """Rounds of a piece and at least one step.

    MLX computes in the background: the end of a step is waited for in what comes after it. So the
    first step after a piece seems to take no time, and the next piece that much more.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._share, self._gap = schedule.prefill_share, schedule.longest_gap
        self.cost = PrefillCost()
        self._steps: dict[int, float] = {}
        """Seconds of a step, by the rows that it served."""
        self._owed = 0.0
        """Seconds of steps that the rows are to have before the next piece."""
        self._stepped = 0
        """Steps since the last piece."""
        self._pending = 0.0
        """Seconds of a step that will be waited for in the next piece."""
        self._paying = False
        """Steps until nothing is owed."""
        self._single = 0
        """Rounds in a row that had a single step."""

    def piece(
        self, decoding: int, waiting: int, rows: int, context: int, *, shared: bool = False
    ) -> int:
        """Tokens to compute now, of all rows of the next piece together; 0: a step comes first.

        decoding: rows that wait for tokens meanwhile. shared: another model's rows do.
        waiting: rows that have no token yet. rows, context: of the prompts that come next."""
        seconds = min(self._gap, IDLE_SECONDS) if shared else IDLE_SECONDS
        if decoding:
            step = self._step(decoding)
            if self._stepped < self._steps_due or self._owes_steps(waiting, step):
                return 0
            # As long as one step leaves of the gap; longer, if one step is more than its share.
            even = step / self._step_debt(1.0)
            seconds = min(self._gap, max(self._gap - step, even))
        # Pieces of one size tell nothing of what a larger one costs, which may be next to nothing.
        least = LEAST + (LEAST // 2 if self.cost.knows_one_size else 0)
        least = max(least, min(MOST_USEFUL, self.cost.useful))
        return max(least, min(MOST, self.cost.tokens(seconds, rows, context)))

    def _owes_steps(self, waiting: int, step: float) -> bool:
        """Whether steps are owed. While several prompts wait, they are saved up for a while: a step
        serves more rows then, and takes no longer."""
        if waiting > 1 and not self._paying:
            self._paying = self._owed > SAVED_SECONDS
        else:
            self._paying = self._owed > step / 2
        return self._paying

    @property
    def _steps_due(self) -> int:
        return 2 if not self._steps or self._single >= STEP_EVERY else 1

    def stepped(self, decoding: int, seconds: float) -> None:
        if self._stepped:
            known = self._steps.get(decoding, seconds)
            self._steps[decoding] = 0.7 * known + 0.3 * seconds
        else:
            self._pending = max(0.0, self._step(decoding) - seconds)
        self._stepped += 1
        step = self._step(decoding)
        self._owed = max(self._owed - step, -step)

    def prefilled(self, piece: PrefillPiece, decoding: int, seconds: float) -> None:
        took = max(seconds - self._pending, seconds / 4) if decoding else seconds
        self.cost.learn(piece, took)
        self._single = self._single + 1 if self._stepped == 1 else 0
        self._stepped, self._pending = 0, 0.0
        self._owed = self._owed + self._step_debt(took) if decoding else 0.0

    def _step_debt(self, seconds: float) -> float:
        """Of steps, for a piece that took so long."""
        return min(DEAREST, (1 - self._share) / self._share) * MARGIN * seconds

    def _step(self, decoding: int) -> float:
        """Of so many rows, or of the nearest number that was measured."""
        if not self._steps:
            return 0.0
        return self._steps[min(self._steps, key=lambda rows: abs(rows - decoding))]
