"""Circuit breakers: after several failures an upstream gets no requests until a probe succeeds."""

import time
from collections.abc import Callable

FAILURES = 5
"""The number of failures in a row that opens the breaker."""
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 120.0
"""The first and the longest pause without a request, in seconds. The pause doubles with each probe
that fails."""
MOST_CLIENTS = 1024
"""The clients whose failures are counted; the one that failed first is forgotten."""


class CircuitBreaker:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._closed_at: float | None = None
        """The time from which a request is sent as a probe; None while the breaker is closed."""
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self._closed_at is not None

    def seconds_left(self) -> float:
        """The seconds until a request may be sent; 0 if one may be sent now. While a probe runs it
        is always 1."""
        if self._closed_at is None:
            return 0.0
        left = max(0.0, self._closed_at - self._clock())
        return left if left or not self._probing else 1.0

    def begin(self) -> None:
        """Records that a request is sent, which is the probe if the breaker is open."""
        self._probing = self.is_open

    def abandoned(self) -> None:
        """Records that a request ended without a result, for example because its client left."""
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


class UpstreamBreaker:
    """The breakers of one upstream.

    That no connection can be made says something about the upstream, and counts for all clients.
    All other failures may be due to what a client has sent, and count for this client alone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._connecting = CircuitBreaker(clock)
        self._failing: dict[str, CircuitBreaker] = {}
        """By client, for those whose last request failed."""
        self._has_answered = False
        """Whether the last request succeeded."""

    @property
    def is_open(self) -> bool:
        """Whether the upstream seems to be out of order for everybody."""
        failing = any(breaker.is_open for breaker in self._failing.values())
        return self._connecting.is_open or (failing and not self._has_answered)

    def seconds_left(self, client: str) -> float:
        return max(breaker.seconds_left() for breaker in self._of(client))

    def begin(self, client: str) -> None:
        for breaker in self._of(client):
            breaker.begin()

    def abandoned(self, client: str) -> None:
        for breaker in self._of(client):
            breaker.abandoned()

    def succeeded(self, client: str) -> None:
        self._connecting.succeeded()
        self._failing.pop(client, None)
        self._has_answered = True

    def failed(self, client: str) -> None:
        """Records that the upstream refused or lost a request."""
        self._connecting.succeeded()
        if client not in self._failing:
            self._failing[client] = CircuitBreaker(self._clock)
            if len(self._failing) > MOST_CLIENTS:
                del self._failing[next(iter(self._failing))]
        self._failing[client].failed()
        self._has_answered = False

    def unreachable(self, client: str) -> None:
        """Records that no connection was made."""
        self.abandoned(client)
        self._connecting.failed()

    def _of(self, client: str) -> list[CircuitBreaker]:
        own = self._failing.get(client)
        return [self._connecting, own] if own else [self._connecting]
