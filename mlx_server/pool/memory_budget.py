"""How many bytes weights and caches may take together, and where that number comes from."""

from dataclasses import dataclass

import psutil

WORKING_BYTES, WORKING_SHARE = 250 << 20, 0.05
"""Kept out of the default budget, for what is computed next to weights and caches: the activations
of the longest piece of a prompt (0.1 to 0.6 GB with the models that people run), and the copies of
a layer's cache that exist twice while it grows, while a row joins a batch or leaves it, and while
a prompt is kept for later. The table in tests/pool/test_memory_budget.py counts them."""

SHARE_OF_RAM = 0.75
"""Where there is no Metal to recommend anything."""


@dataclass(frozen=True)
class MemoryBudget:
    nbytes: int
    recommended: int
    """The working set that Metal recommends; without Metal, a share of the RAM."""
    metal: bool
    chosen: bool
    """Whether it is the owner's `memory_budget`."""

    @property
    def mlx_limit(self) -> int:
        """Bytes at which MLX waits for work to end, and keeps no freed buffers."""
        return self.nbytes if self.chosen else self.recommended

    @property
    def source(self) -> str:
        if self.chosen:
            return "set by `memory_budget` in models.yaml"
        whole = "the working set that Metal recommends" if self.metal else "three quarters of RAM"
        working = size(self.recommended - self.nbytes)
        return (
            f"{whole} ({size(self.recommended)}) without {working} to compute in; "
            "`memory_budget` in models.yaml changes it"
        )

    @property
    def warning(self) -> str | None:
        """What may go wrong with it."""
        if self.nbytes <= self.recommended:
            return None
        whole = "Metal recommends for this machine" if self.metal else "is three quarters of RAM"
        return (
            f"The memory budget of {size(self.nbytes)} is more than the {size(self.recommended)} "
            f"that {whole}: when it is used up, the system may swap, or end programs. Lower "
            "`memory_budget` in models.yaml."
        )


def budget_of(chosen: int | None, recommended: int | None) -> MemoryBudget:
    """chosen: by the owner. recommended: by Metal, where there is Metal."""
    there = recommended or int(SHARE_OF_RAM * psutil.virtual_memory().total)
    default = there - int(WORKING_SHARE * there) - WORKING_BYTES
    # what is too small to be a machine still gets something
    return MemoryBudget(chosen or max(default, there // 2), there, bool(recommended), bool(chosen))


def size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"
