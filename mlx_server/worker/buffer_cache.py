"""Decides when MLX frees the buffers that it keeps for reuse.

A KV cache grows by allocating a larger buffer. The old one has a size that is not needed again, so
such buffers pile up while rows decode. The buffers of a step itself are reused by the next one:
freeing them too often makes each step get new memory from the system, zeroed page by page.
"""

from dataclasses import dataclass

EVERY_STEPS = 256
"""Decoding steps after which buffers are freed: KV caches grow in pieces of as many tokens."""

FLOOR_BYTES = 256 << 20
"""Fewer bytes than this are not worth freeing."""

SHARE = 0.1
"""The share of the memory limit above which buffers are freed earlier."""

LEAST_STEPS = 16
"""The fewest decoding steps between two times that buffers are freed, even if the steps themselves
use more than the share."""


@dataclass
class Buffers:
    limit: int
    """MLX's memory limit in bytes."""
    _steps: int = 0
    """Decoding steps since buffers were freed."""

    def should_free(self, held: int, *, prefilling: bool) -> bool:
        """Whether to free the buffers; call it once after each step.

        held: bytes kept for reuse. prefilling: whether the next piece of a prompt will reuse them.
        """
        if prefilling:
            return False
        self._steps += 1
        if held <= FLOOR_BYTES:
            return False
        often = self._steps >= LEAST_STEPS and held > SHARE * self.limit
        if often or self._steps >= EVERY_STEPS:
            self._steps = 0
            return True
        return False
