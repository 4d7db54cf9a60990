"""Failures after which a request to an upstream may be sent again, and when."""

import random

from mlx_server import limits
from mlx_server.errors import ServerError

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
"""The first and the longest pause before a request is sent again, in seconds. It doubles each time,
and up to half of it is left out at random."""


class Retriable(Exception):
    """The request may be sent again. `error` is reported if it is not."""

    def __init__(self, error: ServerError, pause: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.pause = pause
        """The seconds to wait that the upstream asks for, if any."""


class Unreachable(Retriable):
    """No connection was made, so it can't be due to the request."""


def pause_before(attempt: int, failure: Retriable) -> float | None:
    """The seconds before the next attempt; None if the upstream asks for more than the limit."""
    backoff = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE)
    jittered = backoff * random.uniform(0.5, 1.0)  # noqa: S311 - it keeps no secret
    asked = failure.pause or 0.0
    return None if asked > limits.UPSTREAM_PAUSE_SECONDS else max(asked, jittered)
