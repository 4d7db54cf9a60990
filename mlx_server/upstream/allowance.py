"""Bounds what one upstream answer, and all of them together, take of the server."""

import time
from collections.abc import Callable
from typing import ClassVar

from mlx_server import limits
from mlx_server.errors import UpstreamFailed

MEMORY_PER_BYTE = 4
"""The bytes of memory that are reckoned for each byte that an upstream sends. What is kept of an
event takes one to four times the event's size."""


class Allowance:
    """The memory and the time of one answer, across every request that is made for it."""

    _charged_in_all: ClassVar[int] = 0
    _running: ClassVar[int] = 0

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + seconds
        self._charged = 0

    @property
    def seconds_left(self) -> float:
        return self._ends_at - self._clock()

    def charge(self, size: int) -> None:
        """Charges received bytes. Raises UpstreamFailed if this answer has too many. If all answers
        together do, that is raised for those with more than their equal share."""
        if not self._charged:
            Allowance._running += 1
        self._charged += size * MEMORY_PER_BYTE
        Allowance._charged_in_all += size * MEMORY_PER_BYTE
        if self._charged > limits.UPSTREAM_MEMORY:
            raise UpstreamFailed("The upstream sent too many bytes.")
        most = limits.UPSTREAM_ALL_MEMORY
        if Allowance._charged_in_all > most < self._charged * Allowance._running:
            raise UpstreamFailed(
                "The answers that run take too much memory together, and this one more than its "
                "share. Try again later."
            )

    def release(self) -> None:
        """Ends the answer, so that others may use its memory."""
        if self._charged:
            Allowance._charged_in_all -= self._charged
            Allowance._running -= 1
            self._charged = 0
