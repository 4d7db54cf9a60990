"""What grammars cost a step of decoding, as tables."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_parts.apart import apart

MOST = 0.05
"""Of a step of ten milliseconds, with eight rows."""
STEP = 10.0
JUDGED = ("49k", "200k")
"""The tiny networks: a step of the demo model is ten times as long as the one that is meant."""

Row = tuple[str, ...]
Columns = tuple[Row, Iterator[Row]]
Measured = dict[str, Any]


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
        for name, steps in costs.items()
        for rows, step in steps.items()
    )
    return columns, rows


def goals(costs: Measured) -> Columns:
    added = {name: costs[name]["8"]["added"] / STEP for name in JUDGED}
    rows = (
        (
            f"8 rows, {name} tokens: added, over a step of {STEP:.0f} ms",
            f"<= {MOST}",
            f"{share:.3f}",
            "yes" if share <= MOST else "no",
        )
        for name, share in added.items()
    )
    return ("goal", "wanted", "measured", "reached"), rows
