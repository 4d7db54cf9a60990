"""How much prompt to prefill between two steps of the rows that decode.

While rows decode, prefill gets as much time as they do, so that the time between their tokens at
most doubles: in every cycle where a useful piece is as quick as a step, as on a GPU, and on the
average where it is not. Sizes are found by measuring, since they differ a thousandfold between
machines and models.
"""

PACED = (32, 2048)
IDLE = (64, 2048)
"""Least and most tokens of a piece, with rows decoding and without. Smaller ones waste time: the
weights are read once for a piece, whatever its size."""

IDLE_SECONDS = 0.25
"""A piece with nobody waiting for tokens: short enough to notice a cancel soon."""

ALONE_EVERY = 16
"""So often a step goes without prefill, to see how long it takes by itself."""


class Pace:
    def __init__(self) -> None:
        self._step: float | None = None
        """Seconds of a step by itself."""
        self._debt = 0.0
        """Seconds that prefill has had over those of the steps."""
        self._paced, self._idle = PACED[0], 4 * IDLE[0]
        self._together = 0

    def tokens(self, *, decoding: bool) -> int:
        """How many tokens of prompt to prefill in this cycle; 0: a step by itself."""
        if not decoding:
            return self._idle
        alone = self._step is None or self._debt >= self._step or self._together >= ALONE_EVERY
        return 0 if alone else self._paced

    def cycle(self, seconds: float, *, prefilled: int, decoding: bool) -> None:
        """What the last cycle took: a step, a piece of prefill, or both."""
        if not decoding:
            self._debt = 0.0
            if prefilled:
                self._idle = _fitted(prefilled, IDLE_SECONDS / seconds, self._idle, IDLE)
        elif not prefilled:
            self._together = 0
            self._step = seconds if self._step is None else 0.7 * self._step + 0.3 * seconds
            self._debt = max(0.0, self._debt - self._step)
        elif self._step is not None:
            self._together += 1
            spent = max(seconds - self._step, 0.25 * seconds)
            self._debt += spent - self._step
            self._paced = _fitted(prefilled, self._step / spent, self._paced, PACED)


def _fitted(done: int, factor: float, wanted: int, limits: tuple[int, int]) -> int:
    """The size that would have taken the right time, approached by at most a factor of two."""
    if done < wanted and factor > 1:  # it was the end of a prompt, and tells nothing of more
        return wanted
    least, most = limits
    return max(least, min(most, int(done * min(2.0, max(0.5, factor)))))
