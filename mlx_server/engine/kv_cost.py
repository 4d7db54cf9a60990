"""The memory that the caches of one row take, as a function of its tokens."""

from bisect import bisect_right
from dataclasses import dataclass

STEP = 256
"""Number of tokens by which mlx-lm's KV caches grow."""

PADDING_SHARE = 8
"""Padding of groups of decoding rows may take one part in so many of the memory that the weights
leave."""

PREFILL_PADDING = 2400
"""The tokens by which prompts that are computed together may be padded."""


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
        """Returns the number of tokens that fit into `nbytes`, up to `at_most`."""
        return max(0, bisect_right(range(at_most + 1), nbytes, key=self.for_tokens) - 1)

    def most_padding(self, room: int) -> int | None:
        """Returns the tokens by which groups of decoding rows may be padded; None: any number.

        room: the bytes of the budget that the model's weights leave.
        """
        each = self.per_token + self.windowed_per_token
        return max(0, room) // PADDING_SHARE // each if each else None

    def padding_bytes(self, most_padding: int) -> int:
        """Returns the most bytes of padding, in groups of decoding rows and in prompts computed
        together."""
        return (self.per_token + self.windowed_per_token) * (most_padding + PREFILL_PADDING)


NOTHING = KvCost()
