"""Computes how long a simulated Mac takes for a session's prompts, of which a server has cached a
part."""

from collections.abc import Sequence

from bench_parts.simulated.roofline import pair, seconds

PAIR = "m4-pro:30b-a3b"
"""The Mac and the model of the column; see roofline.py."""

PIECE = 2048
"""The most tokens of a pass."""


def prefill_seconds(spans: Sequence[tuple[int, int]], named: str = PAIR) -> float:
    """Returns the seconds. spans: for each prompt, the number of its cached tokens, and of all its
    tokens."""
    machine, model = pair(named)
    pieces = (
        (begin, min(begin + PIECE, end))
        for cached, end in spans
        for begin in range(cached, end, PIECE)
    )
    return sum(seconds(machine, model, end - begin, [end]) for begin, end in pieces)
