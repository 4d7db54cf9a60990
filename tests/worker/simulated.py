"""The simulated machines of scripts/bench, for tests."""

from pathlib import Path

from bench_parts.simulated.roofline import MACHINES, PAIRS, pair, seconds
from bench_parts.simulated.virtual import (
    GREEDY,
    Answer,
    Network,
    Simulation,
    alone_by_mlx_lm,
    crowd,
    long_prompt_next_to_stream,
    together_by_mlx_lm,
)

SITE = Path(__file__).parents[2] / "scripts" / "bench_parts" / "simulated" / "site"

__all__ = [
    "GREEDY",
    "MACHINES",
    "PAIRS",
    "SITE",
    "Answer",
    "Network",
    "Simulation",
    "alone_by_mlx_lm",
    "crowd",
    "long_prompt_next_to_stream",
    "pair",
    "seconds",
    "together_by_mlx_lm",
]
