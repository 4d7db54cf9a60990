"""Texts that complete a number which several schemas allow."""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

MOST_DIGITS = 18
"""The most digits that are added to a number."""
MOST_CHARACTERS = 400
"""A longer number is taken for whole."""
_FRACTIONS = ("", "0", "1", "5", "9", "01", "05", "001")


def number_endings(parts: Sequence[Mapping[str, Any]], begun: str, *, whole: bool) -> Iterator[str]:
    """Yields what may complete the number that begins with this text, the shortest first."""
    if "e" in begun.lower() or len(begun) > MOST_CHARACTERS:  # of any size
        yield "" if begun[-1:].isdigit() else "0"
        return
    lows = [*_bounds(parts, "minimum", "exclusiveMinimum")]
    highs = [*_bounds(parts, "maximum", "exclusiveMaximum")]
    steps = [Fraction(str(part["multipleOf"])) for part in parts if "multipleOf" in part]
    steps += [Fraction(1)] * whole

    def fits(text: str) -> bool:
        number = Fraction(text)
        return (
            all(number % step == 0 for step in steps if step)
            and all(number >= low and (number != low or not is_open) for low, is_open in lows)
            and all(number <= high and (number != high or not is_open) for high, is_open in highs)
        )

    ends = [bound for bound, _ in (*lows, *highs)]
    step = math.lcm(*(one.numerator for one in steps if one)) if steps else 1
    texts = dict.fromkeys([*_longer(begun, ends, step), *_near(ends, steps)])
    fitting = [text for text in texts if text.startswith(begun) and _is_number(text) and fits(text)]
    yield from sorted((text[len(begun) :] for text in fitting), key=len)


def _bounds(
    parts: Sequence[Mapping[str, Any]], key: str, exclusive: str
) -> Iterator[tuple[Fraction, bool]]:
    """Yields the bounds, and whether the bound itself is excluded."""
    for part in parts:
        if key in part:
            yield Fraction(str(part[key])), part.get(exclusive) is True
        if not isinstance(part.get(exclusive, True), bool):
            yield Fraction(str(part[exclusive])), True


def _longer(begun: str, ends: Sequence[Fraction], step: int) -> Iterator[str]:
    """Yields numbers that begin with this text."""
    if "." in begun:
        yield from (begun + digits for digits in _FRACTIONS)
        return
    sign, digits = ("-", begun[1:]) if begun.startswith("-") else ("", begun)
    if not digits:
        yield from (f"{sign}{number}" for number in (0, 1, step))
        return
    yield from (f"{begun}.{digits}" for digits in _FRACTIONS[1:])
    for more in range(MOST_DIGITS if digits != "0" else 1):
        low, most = int(digits) * 10**more, (int(digits) + 1) * 10**more - 1
        for start in (low, *(abs(math.floor(end)) + n for end in ends for n in (0, 1))):
            number = -(-start // step) * step
            if low <= number <= most:
                yield f"{sign}{number}"


def _near(ends: Sequence[Fraction], steps: Sequence[Fraction]) -> Iterator[str]:
    """Yields numbers next to the bounds."""
    numbers = [*ends, *(Fraction(math.floor(end) + n) for end in ends for n in (-1, 0, 1, 2))]
    numbers += [
        Fraction(math.floor(end * 10**n) + m, 10**n)
        for end in ends
        for n in (1, 2, 4)
        for m in (0, 1)
    ]
    numbers += [(one + other) / 2 for one in ends for other in ends]
    numbers += [
        step * (math.floor(e / step) + n) for e in ends for step in steps if step for n in (0, 1)
    ]
    for number in numbers:
        if number.denominator == 1:
            yield str(number.numerator)
        elif Fraction(text := format(float(number), "f").rstrip("0")) == number:
            yield text


def _is_number(text: str) -> bool:
    try:
        Fraction(text)
    except ValueError:
        return False
    return text[-1:].isdigit()
