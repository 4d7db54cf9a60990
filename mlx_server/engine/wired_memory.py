"""How much of a Mac's memory is wired: kept resident, so that the system never pages it out.

Only weights are wired: they are allocated first and stay. Unwired weights near the size of the
working set are paged in and out with each token; macOS has panicked when everything was wired or
when the limit changed while the GPU worked (ml-explore/mlx#3186, ml-explore/mlx-lm#883). So the
limit is set before the weights of a load are read, only while no row is running, and it never
falls: the next model uses what an unloaded one leaves.
"""

from dataclasses import dataclass

WORTH_SHARE = 0.5
"""Weights below this share of the working set are not wired: they stay resident while in use."""

MOST_SHARE = 0.9
"""The largest share of the working set to wire; the system and the rows' caches need the rest."""


@dataclass(frozen=True)
class Wiring:
    limit: int
    """Bytes to wire; 0 wires nothing."""
    why: str


def wiring(weights: int, working_set: int) -> Wiring:
    """Decides how much to wire.

    weights: bytes of all models in memory and of the one to be loaded. working_set: Metal's
    recommended one in bytes, 0 without Metal.
    """
    most = int(MOST_SHARE * working_set)
    if not working_set:
        return Wiring(0, "this machine has no Metal")
    if weights < WORTH_SHARE * working_set:
        return Wiring(0, f"weights take less than {WORTH_SHARE:.0%} of the working set")
    if weights > most:
        return Wiring(0, f"weights take more than {MOST_SHARE:.0%} of the working set")
    return Wiring(weights, f"weights take {weights / working_set:.0%} of the working set")


def next_limit(present: int, wanted: int, *, rows: bool) -> int:
    """rows: whether any row is running; the limit must not change then."""
    return present if rows else max(present, wanted)
