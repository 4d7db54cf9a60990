"""Samples of speed and memory for the page's charts. Nothing is sampled while nothing happens."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_server import limits
from mlx_server.engine.messages import StepOutput

SECONDS = 15
"""The time that one sample covers."""
PAUSE_SECONDS = 1.0
"""Steps that are further apart do not belong to the same work."""


@dataclass(slots=True)
class Sample:
    at: int
    """A Unix time, when it begins."""
    memory: int
    """The most bytes in use of the memory budget."""
    tokens: int = 0
    busy_seconds: float = 0.0
    """The time in which these tokens were generated."""
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    """The sum of the times to the first token."""


class Samples:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=limits.SAMPLES)
        self._memory = 0
        self._last_step = 0.0

    def stepped(self, step: StepOutput) -> None:
        now = self._clock()
        pause, self._last_step = now - self._last_step, now
        if step.tokens and 0 <= pause <= PAUSE_SECONDS:
            sample = self._present()
            sample.tokens += len(step.tokens)
            sample.busy_seconds += pause

    def first_token(self, seconds: float) -> None:
        sample = self._present()
        sample.first_tokens += 1
        sample.first_token_seconds += seconds

    def memory(self, nbytes: int) -> None:
        if nbytes != self._memory:
            sample = self._present()
            sample.memory = max(sample.memory, nbytes)
            self._memory = nbytes

    def columns(self) -> dict[str, Any]:
        """The samples as one list for each number, with the present memory at their end."""
        now = int(self._clock())
        oldest = now - SECONDS * limits.SAMPLES
        kept = [sample for sample in self._samples if oldest <= sample.at <= now]
        return {
            "now": now,
            "seconds": SECONDS,
            "since": oldest,
            "at": [sample.at for sample in kept],
            "tokens_per_second": [_ratio(each.tokens, each.busy_seconds) for each in kept],
            "first_token_seconds": [
                _ratio(each.first_token_seconds, each.first_tokens) for each in kept
            ],
            "memory": [sample.memory for sample in kept],
            "memory_now": self._memory,
        }

    def _present(self) -> Sample:
        at = int(self._clock()) // SECONDS * SECONDS
        if not self._samples or self._samples[-1].at != at:
            self._samples.append(Sample(at, self._memory))
        return self._samples[-1]


def _ratio(amount: float, of: float) -> float | None:
    return round(amount / of, 3) if of else None
