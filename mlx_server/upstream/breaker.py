"""Keeps requests from an upstream that fails, until a probe shows that it works again."""

import time
from collections.abc import Callable

FAILURES = 5
"""The number of failures in a row that opens the breaker."""
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 120.0
"""The shortest and the longest pause without a request, in seconds. It doubles with each probe that
fails."""


class CircuitBreaker:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._closed_at: float | None = None
        """The time at which the next request is let through as a probe; None while the breaker is
        closed."""
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self._closed_at is not None

    def seconds_left(self) -> float:
        """The seconds for which no request is let through; 0 if one is."""
        if self._closed_at is None:
            return 0.0
        left = max(0.0, self._closed_at - self._clock())
        return left if left or not self._probing else 1.0

    def begin(self) -> None:
        """Note that a request is sent. With an open breaker it is the probe."""
        self._probing = self.is_open

    def abandoned(self) -> None:
        """Note that the request showed nothing, for example because its client disconnected."""
        self._probing = False

    def succeeded(self) -> None:
        self._failures, self._pause, self._closed_at, self._probing = 0, FIRST_PAUSE, None, False

    def failed(self) -> None:
        self._failures += 1
        if self._probing:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if self._probing or (self._failures >= FAILURES and not self.is_open):
            self._closed_at = self._clock() + self._pause
        self._probing = False
