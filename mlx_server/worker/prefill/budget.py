"""Decides how much of a prompt to compute before the decoding rows get their next token.

On a GPU a step costs nearly the same for one row as for eight, and a small piece of prefill reads
nearly as many weights as a large one. So a piece takes as long as streams may wait, and is followed
by steps until prefill has had no more than its share of the time.
"""

from math import ceil, inf

from mlx_server.engine.messages import Schedule
from mlx_server.worker.prefill.cost import PrefillCost, PrefillPiece

IDLE_SECONDS = 0.5
"""Seconds of a piece while no row decodes: short enough to notice a cancel or a new prompt soon."""

LAST_PIECE = 1.15
"""The last piece of a prompt may be longer than the others by this factor, since a short additional
piece wastes time."""

LEAST, MOST = 32, 2048
"""Bounds on the tokens of a piece; mlx-lm would cut longer ones."""
DEEP_LEAST = 16
"""The least piece after more than MOST tokens, where attention makes LEAST tokens take too long."""
MOST_USEFUL = 512
"""The least piece may be raised to this many tokens where a piece has a large constant cost."""

SAVED_SECONDS = 1.0
"""The most seconds of owed steps that are postponed while several prompts wait."""

MARGIN = 1.07
"""The factor on owed steps, for what the time of the last piece exceeds its prediction."""

DEAREST = 1000.0
"""The most seconds of steps for one second of prefill, where the prefill share is tiny."""

STEP_EVERY = 16
"""The number of rounds with a single step after which one has two: the second one shows how long a
step takes by itself."""


class PrefillBudget:
    """Alternates rounds of one piece of prefill and at least one step.

    MLX computes in the background, and the operation after a step waits for the step's end. So the
    first step after a piece seems to take no time, and the next piece that much more.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._share, self._gap = schedule.prefill_share, schedule.longest_gap
        self.cost = PrefillCost()
        self._steps: dict[int, float] = {}
        """Seconds of a step by its number of rows, smoothed."""
        self._owed = 0.0
        """Seconds of steps that are due before the next piece."""
        self._stepped = 0
        """Steps since the last piece."""
        self._pending = 0.0
        """Seconds of the latest step that the next piece will wait for."""
        self._advance = 0.0
        """Seconds of steps that come before a prompt's last piece and count for it, and for the
        pass that computes the first token of its answer: steps after these would come after the
        prompt. If several prompts wait, no steps come before: they follow the last prompt, in a
        fuller batch."""
        self._waits = False
        """Whether a prompt has waited since the last step."""
        self._in_company = False
        """Whether another prompt has waited with the present one, at any step since the last one
        without a prompt."""
        self._paying = False
        """Whether steps run until none are owed."""
        self._waited = 0.0
        """Seconds of prefill since the last step."""
        self._joined = False
        """Whether a new row has joined since the last step."""
        self._single = 0
        """Consecutive rounds that had a single step."""

    def piece(
        self,
        decoding: int,
        waiting: int,
        rows: int,
        context: int,
        *,
        left: float = inf,
        shared: bool = False,
    ) -> int:
        """Returns the tokens to compute now, of all rows of the next piece together; 0 if a step
        comes first.

        decoding: the number of decoding rows. shared: whether another model's rows decode.
        waiting: the number of rows without a token. rows, context: those of the next piece.
        left: the tokens of these rows that are still to be computed.
        """
        seconds = min(self._gap, IDLE_SECONDS) if shared else IDLE_SECONDS
        self._in_company = self._in_company or waiting > rows
        self._advance = 0.0
        self._waits = True
        if not decoding:
            return self._tokens(seconds, rows, context)
        step = self._step(decoding)
        due = self._joined or self._stepped < self._steps_due
        if due or self._owes_steps(waiting, step):
            return 0
        # What one step leaves of the gap, or more if one step exceeds the share of the steps.
        even = step / self._step_debt(1.0)
        tokens = self._tokens(min(self._gap, max(self._gap - step, even)), rows, context)
        if left <= tokens * LAST_PIECE and not self._in_company:
            last = PrefillPiece(rows, ceil(left / rows), context)
            self._advance = self._step_debt(self.cost.seconds(last) + self._step(rows))
            if self._owed + self._advance > 0:
                return 0
        return tokens

    def _tokens(self, seconds: float, rows: int, context: int) -> int:
        # Pieces of one size do not show what further tokens cost, which may be very little.
        least = LEAST + (LEAST // 2 if self.cost.knows_one_size else 0)
        piece = PrefillPiece(rows, ceil(LEAST / rows), context)
        if context > MOST and self.cost.seconds(piece) > seconds:
            least = DEEP_LEAST
        least = max(least, min(MOST_USEFUL, self.cost.useful))
        return max(least, min(MOST, self.cost.tokens(seconds, rows, context)))

    def is_step_first(self, context: int) -> bool:
        """Whether decoding rows get a token before a new row with so many tokens joins them.

        They have just waited for a piece, and the first steps with a long cache take longer than
        the others. A short one joins at once."""
        return context > MOST and self._waited > self._gap / 2

    def joined(self, rows: int) -> None:
        """Notes that so many new rows decode, after a pass of their own for their first tokens: a
        step sends these before the next piece."""
        self._joined = True
        if self._advance:
            self._owed += self._step_debt(self._step(rows))

    def _owes_steps(self, waiting: int, step: float) -> bool:
        """Whether steps are due. While several prompts wait, steps are postponed for a while: they
        serve more rows later and take no longer."""
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
        self._waited, self._joined = 0.0, False
        self._in_company, self._waits = self._in_company and self._waits, False
        step = self._step(decoding)
        # A step more than `_advance`, which grows with the measured time of a step.
        self._owed = max(self._owed - step, -(step + self._advance))

    def prefilled(self, piece: PrefillPiece, decoding: int, seconds: float) -> None:
        took = max(seconds - self._pending, seconds / 4) if decoding else seconds
        self.cost.learn(piece, took)
        self._waited += took
        self._single = self._single + 1 if self._stepped == 1 else 0
        self._stepped, self._pending = 0, 0.0
        self._owed = self._owed + self._step_debt(took) if decoding else 0.0

    def _step_debt(self, seconds: float) -> float:
        """Returns the seconds of steps that are owed for a piece of `seconds`."""
        return min(DEAREST, (1 - self._share) / self._share) * MARGIN * seconds

    def _step(self, decoding: int) -> float:
        """Returns the seconds of a step of `decoding` rows, or of the nearest measured number."""
        if not self._steps:
            return 0.0
        return self._steps[min(self._steps, key=lambda rows: abs(rows - decoding))]
