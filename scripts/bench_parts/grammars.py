"""Tabulates what grammars cost a step of decoding."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from bench_parts.apart import apart

MOST = 0.05
"""The most that a grammar may add, as a share of a step of ten milliseconds with eight rows."""
STEP = 10.0
JUDGED = ("49k", "200k")
"""The tiny networks, to which MOST applies: a step of the demo model is ten times as long as ten
milliseconds."""

Row = tuple[str, ...]
Columns = tuple[Row, Iterator[Row]]
Measured = dict[str, Any]


STALL = 1.3
"""The most times as long that a plain row may wait for a step next to rows with patterns."""


def costs(folder: Path) -> Measured:
    return apart("bench_parts.structured", folder)


def decoding(costs: Measured) -> Columns:
    columns = ("vocabulary", "rows", "free step, ms", "added by a JSON schema, ms", "per row")
    rows = (
        (
            name,
            rows,
            f"{step['free']:.1f}",
            f"{step['added']:.2f}",
            f"{step['added'] / int(rows):.3f}",
        )
        for name, steps in costs["steps"].items()
        for rows, step in steps.items()
    )
    return columns, rows


def goals(costs: Measured) -> Columns:
    added = {name: costs["steps"][name]["8"]["added"] / STEP for name in JUDGED}
    rows = (
        (
            f"8 rows, {name} tokens: added, over a step of {STEP:.0f} ms",
            f"<= {MOST}",
            f"{share:.3f}",
            "yes" if share <= MOST else "no",
        )
        for name, share in added.items()
    )
    stalls = costs["stalls"]
    longer = stalls["patterns, longest"] / stalls["free, longest"]
    least = stalls["patterns, least"] / stalls["free, least"]
    gap = (
        "15 rows with patterns next to a plain one: its longest gap, over that without patterns",
        f"<= {STALL}",
        f"{longer:.2f} ({stalls['patterns, longest']:.0f} / {stalls['free, longest']:.0f} ms); "
        f"{least:.2f} by the least time of each step in all rounds",
        "yes" if longer <= STALL else "no",
    )
    return ("goal", "wanted", "measured", "reached"), chain(rows, [gap])
