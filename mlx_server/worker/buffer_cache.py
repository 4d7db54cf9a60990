"""When MLX gives back the buffers that it keeps for reuse.

A KV cache grows by making a larger one, whose size nothing asks for again: what it leaves behind
piles up while rows decode. What a step itself uses is taken again by the next one, so that giving
it back too often costs each of them new memory from the system, zeroed page by page.
"""

from dataclasses import dataclass

EVERY_STEPS = 256
"""Of decoding: KV caches grow by as many tokens."""

FLOOR_BYTES = 256 << 20
"""Not worth giving back."""

SHARE = 0.1
"""Of the memory limit: as soon as buffers pass it, they are given back after a step of decoding."""

LEAST_STEPS = 16
"""Between two times, where what the steps themselves use passes the share."""


@dataclass
class Buffers:
    limit: int
    """What MLX may hold in all."""
    _steps: int = 0
    """Of decoding, since buffers were given back."""

    def to_give_back(self, held: int, *, prefilling: bool) -> bool:
        """To be asked after each step. held: bytes kept for reuse. prefilling: the next piece of
        the same prompt will want them again."""
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
