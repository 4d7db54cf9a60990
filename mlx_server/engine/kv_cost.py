"""The memory that the caches of one row take, as a function of its tokens."""

from bisect import bisect_right
from dataclasses import dataclass

STEP = 256
"""Number of tokens by which mlx-lm's KV caches grow."""


@dataclass(frozen=True)
class KvCost:
    """Bytes that one row occupies in a model's caches."""

    per_token: int = 0
    windowed_per_token: int = 0
    window: int = 0
    fixed: int = 0

    def for_tokens(self, n: int) -> int:
        # A cache grows in steps, which need not begin at multiples of STEP.
        slots = n + STEP - 1
        windowed = self.windowed_per_token * min(slots, self.window)
        return self.per_token * slots + windowed + self.fixed

    def tokens_in(self, nbytes: int, at_most: int) -> int:
        """The number of tokens that fit into `nbytes`, up to `at_most`."""
        return max(0, bisect_right(range(at_most + 1), nbytes, key=self.for_tokens) - 1)


NOTHING = KvCost()
