"""Decides how many bytes of weights to read between two steps, by the time that reading takes.

A disk reads 0.1 to 8 GB a second, and MLX converts some weights while it reads, so a fixed number
of bytes would not bound how long the rows of other models wait.
"""

DECODING_SECONDS = 0.008
"""Seconds of reading between two steps while rows decode: less than a step takes."""

ALONE_SECONDS = 0.25
"""Seconds of a piece while no row is running: short enough to notice a command soon."""

FIRST_BYTES = 8 << 20
LEAST_BYTES, MOST_BYTES = 1 << 20, 2 << 30

MOST_GROWTH = 4.0
"""The most growth from one piece to the next: one that came from the page cache says little about
the disk."""


class WeightReadPace:
    def __init__(self) -> None:
        self.while_decoding = False
        """Whether rows wait for each piece to be read."""
        self._rate: float | None = None
        """Bytes per second, smoothed; None before the first piece."""
        self._last = 0

    @property
    def nbytes(self) -> int:
        """The size of the next piece. A tensor that is larger is read as a whole."""
        if self._rate is None:
            return min(FIRST_BYTES, MOST_BYTES)
        wanted = self._rate * (DECODING_SECONDS if self.while_decoding else ALONE_SECONDS)
        return int(min(MOST_BYTES, MOST_GROWTH * self._last, max(LEAST_BYTES, wanted)))

    def learn(self, nbytes: int, seconds: float) -> None:
        """Adjusts the rate by the time that a piece took."""
        rate = nbytes / max(seconds, 1e-6)
        self._rate = rate if self._rate is None else 0.5 * (self._rate + rate)
        self._last = max(nbytes, LEAST_BYTES)
