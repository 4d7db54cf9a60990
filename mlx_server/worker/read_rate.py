"""How many bytes of weights to read between two steps: sized by the time that they take.

A disk reads 0.1 to 8 GB a second, and MLX converts some weights on the way, so bytes alone say
nothing of how long the rows of other models wait.
"""

DECODING_SECONDS = 0.008
"""Of each step of the rows that decode meanwhile: less than one takes by itself."""

ALONE_SECONDS = 0.25
"""With no row under way: short enough to notice a command soon."""

FIRST_BYTES = 8 << 20
LEAST_BYTES, MOST_BYTES = 1 << 20, 2 << 30

MOST_GROWTH = 4.0
"""From one piece to the next: a piece that was read from the page cache says little of the disk."""


class WeightReadPace:
    def __init__(self) -> None:
        self.while_decoding = False
        """Whether rows wait for each piece to be read."""
        self._rate: float | None = None
        """Bytes a second."""
        self._last = 0

    @property
    def nbytes(self) -> int:
        """Of the next piece. A tensor that is larger is read as a whole."""
        if self._rate is None:
            return min(FIRST_BYTES, MOST_BYTES)
        wanted = self._rate * (DECODING_SECONDS if self.while_decoding else ALONE_SECONDS)
        return int(min(MOST_BYTES, MOST_GROWTH * self._last, max(LEAST_BYTES, wanted)))

    def learn(self, nbytes: int, seconds: float) -> None:
        """From a piece that was read."""
        rate = nbytes / max(seconds, 1e-6)
        self._rate = rate if self._rate is None else 0.5 * (self._rate + rate)
        self._last = max(nbytes, LEAST_BYTES)
