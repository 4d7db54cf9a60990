"""How much of a Mac's memory is wired: kept resident, so that the system never pages it out.

Only weights are wired: they are allocated first and stay. Unwired weights near the size of the
working set are paged in and out with each token; macOS has panicked when everything was wired or
when the limit changed while the GPU worked (ml-explore/mlx#3186, ml-explore/mlx-lm#883). So the
limit is set before the weights of a load are read, only while no row is running, and it never
falls: the next model uses what an unloaded one leaves.
"""

WORTH_SHARE = 0.5
"""Weights below this share of the working set are not wired: they stay resident while in use."""

MOST_SHARE = 0.9
"""The largest share of the working set to wire; the system and the rows' caches need the rest."""


def wiring(weights: int, working_set: int) -> int:
    """Returns how many bytes to wire: all weights, or none.

    weights: bytes of all models in memory and of the one to be loaded. working_set: Metal's
    recommended one in bytes.
    """
    is_worth = WORTH_SHARE * working_set <= weights <= MOST_SHARE * working_set
    return weights if is_worth else 0


def next_limit(present: int, wanted: int, *, rows: bool) -> int:
    """rows: whether any row is running; the limit must not change then."""
    return present if rows else max(present, wanted)
