"""How much of a Mac's memory is wired: kept resident, so that the system never pages it out.

Only weights are: what is allocated first, and stays. Unwired weights near the size of the working
set are paged in and out with each token; wiring everything, or changing the limit while the GPU
works, is what macOS has panicked at (ml-explore/mlx#3186, ml-explore/mlx-lm#883). So the limit is
set before the weights of a load are read, only while no row is under way, and it never falls: what
an unloaded model leaves is for the next one.
"""

from dataclasses import dataclass
from typing import Literal

Wired = Literal["auto", "never"] | int

WORTH_SHARE = 0.5
"""Of the working set. Weights that take less are not paged out while they are in use."""

MOST_SHARE = 0.9
"""Of the working set: the system, and the caches of rows, need what is left."""


@dataclass(frozen=True)
class Wiring:
    limit: int
    """Bytes; 0: nothing is wired."""
    why: str


def parse_wired(text: str) -> Wired:
    return "auto" if text == "auto" else "never" if text == "never" else int(text)


def wiring(wired: Wired, weights: int, working_set: int) -> Wiring:
    """weights: of all models in memory and the one to be loaded. working_set: Metal's recommended
    one, 0 where there is no Metal."""
    most = int(MOST_SHARE * working_set)
    if not working_set:
        return Wiring(0, "this machine has no Metal")
    if wired == "never":
        return Wiring(0, "the setting says never")
    if wired != "auto":
        return Wiring(min(wired, weights, most), "as set, and no more than weights")
    if weights < WORTH_SHARE * working_set:
        return Wiring(0, f"weights take less than {WORTH_SHARE:.0%} of the working set")
    if weights > most:
        return Wiring(0, f"weights take more than {MOST_SHARE:.0%} of the working set")
    return Wiring(weights, f"weights take {weights / working_set:.0%} of the working set")


def next_limit(present: int, wanted: int, *, rows: bool) -> int:
    """rows: whether any are under way."""
    return present if rows else max(present, wanted)
