"""The shortest number that several schemas allow at once."""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from mlx_server.schemas.bounds import NUMERIC

Parts = Sequence[Mapping[str, Any]]
"""The schemas that constrain the same value."""

MOST_BOUNDS = 8

_NUMERIC = frozenset(NUMERIC)


def shortest_of(texts: Iterator[str | None]) -> str | None:
    return min((text for text in texts if text is not None), key=len, default=None)


def shortest_number(parts: Parts, *, whole: bool) -> str | None:
    if not any(_NUMERIC & part.keys() for part in parts):
        return "0"
    if (plain := _plain_integer(parts)) is not None:
        return plain
    steps = [Fraction(1)] * whole + [
        Fraction(str(p["multipleOf"])) for p in parts if "multipleOf" in p
    ]
    lows, highs = (
        list(_bounds(parts, "minimum", "exclusiveMinimum")),
        list(_bounds(parts, "maximum", "exclusiveMaximum")),
    )

    def fits(number: Fraction) -> bool:
        return (
            all(number % step == 0 for step in steps if step)
            and all(number >= low and (number != low or not open) for low, open in lows)
            and all(number <= high and (number != high or not open) for high, open in highs)
        )

    if fits(Fraction(0)):
        return "0"
    ends = [bound for bound, _ in (*lows, *highs)][:MOST_BOUNDS]
    proposed = [*ends, *(Fraction(math.floor(e) + n) for e in ends for n in (-1, 0, 1, 2))]
    proposed += [
        Fraction(math.floor(e * 10**n) + m, 10**n) for e in ends for n in (1, 2, 4) for m in (0, 1)
    ]
    proposed += [(one + other) / 2 for one, other in product(ends, ends)]
    proposed += [step * (math.floor(e / step) + n) for e in ends for step in steps for n in (0, 1)]
    return shortest_of(map(_decimal, filter(fits, proposed)))


def _plain_integer(parts: Parts) -> str | None:
    """Returns the shortest integer between bounds that are integers; no fraction is shorter.

    It returns None if there is no such integer, and where fractions decide.
    """
    said = [(key, part[key]) for part in parts for key in NUMERIC if key in part]
    if any(key == "multipleOf" or type(value) is not int for key, value in said):
        return None
    lows = [value + (key != "minimum") for key, value in said if key.endswith("inimum")]
    highs = [value - (key != "maximum") for key, value in said if key.endswith("aximum")]
    low, high = max(lows, default=-math.inf), min(highs, default=math.inf)
    near = (0, *(bound + n for bound in (*lows, *highs) for n in (-1, 0, 1)))
    return shortest_of(str(number) for number in near if low <= number <= high)


def _bounds(parts: Parts, key: str, exclusive: str) -> Iterator[tuple[Fraction, bool]]:
    """Yields the bounds, and whether the bound itself is excluded."""
    for part in parts:
        if key in part:
            yield Fraction(str(part[key])), part.get(exclusive) is True
        if not isinstance(part.get(exclusive, True), bool):
            yield Fraction(str(part[exclusive])), True


def _decimal(number: Fraction) -> str | None:
    if number.denominator == 1:
        return str(number.numerator)
    found = format(float(number), "f").rstrip("0")
    return found if Fraction(found) == number else None
