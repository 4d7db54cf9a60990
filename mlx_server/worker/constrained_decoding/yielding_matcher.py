"""A grammar's matcher whose slow calls let other threads run.

llguidance holds the GIL while a matcher consumes or validates tokens. That takes microseconds for
most grammars, but up to a second for one that reads the same text in many ways. For such a grammar
the same is computed by the calls that release the GIL, which cost more.
"""

import time
from collections.abc import Sequence
from functools import cache

from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import consume_token_par

from mlx_server.schemas.compiler import BYTES

SLOW_SECONDS = 0.001
"""The time to consume one token from which on a matcher is slow: fifty times the usual one."""

EMPTY = 'start: ""\n'


class RowGone(Exception):
    """The result is no longer needed."""


class YieldingMatcher:
    def __init__(self, own: LLMatcher) -> None:
        self.own = own
        self.is_abandoned = False
        """Whether calls raise RowGone. Another thread sets it."""
        self._seconds = (0.0, 0.0)
        """The time of the two latest calls that consumed: one alone may have been interrupted."""
        self._other: LLMatcher | None = None
        """llguidance releases the GIL for several matchers only: this one is the second."""

    @property
    def is_slow(self) -> bool:
        return min(self._seconds) > SLOW_SECONDS

    def consume_token(self, token: int) -> bool:
        self._check()
        began = time.perf_counter()
        consumed = self._consume_unlocked(token) if self.is_slow else self.own.consume_token(token)
        self._seconds = self._seconds[1], time.perf_counter() - began
        return consumed

    def _consume_unlocked(self, token: int) -> bool:
        self._other = self._other or LLMatcher(BYTES, EMPTY, log_level=0)
        pairs = [(self.own, token), (self._other, BYTES.eos_token)]
        return consume_token_par(_executor(), pairs)[0]

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        return all(map(self.consume_token, tokens))

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """Returns how many of the tokens may come next, one after another."""
        self._check()
        return self._validate_unlocked(tokens) if self.is_slow else self._validate(tokens)

    def _validate(self, tokens: Sequence[int]) -> int:
        return self.own.validate_tokens(list(tokens))

    def _validate_unlocked(self, tokens: Sequence[int]) -> int:
        taken = 0
        try:
            while taken < len(tokens) and self._allows(tokens[taken]):
                if taken + 1 == len(tokens):
                    return len(tokens)
                self.consume_token(tokens[taken])
                taken += 1
                if self.own.is_stopped():
                    break
            return taken
        finally:
            self.own.rollback(taken)

    def _allows(self, token: int) -> bool:
        """Whether the mask has the token. It is computed by a copy, which may exceed a limit that
        no single token exceeds."""
        copy = self.own.deep_copy()
        mask = copy.compute_bitmask()
        if copy.is_error():
            return self._validate([token]) == 1
        return token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)

    def rollback(self, tokens: int) -> bool:
        return self.own.rollback(tokens)

    def copy(self) -> "YieldingMatcher":
        """Returns a copy that fails alone."""
        copy = YieldingMatcher(self.own.deep_copy())
        copy._seconds = self._seconds
        return copy

    def deep_copy(self) -> LLMatcher:
        return self.own.deep_copy()

    def is_accepting(self) -> bool:
        return self.own.is_accepting()

    def is_error(self) -> bool:
        return self.own.is_error()

    def is_stopped(self) -> bool:
        return self.own.is_stopped()

    def _check(self) -> None:
        if self.is_abandoned:
            raise RowGone


@cache
def _executor() -> LLExecutor:
    return LLExecutor(2)
