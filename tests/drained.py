"""What a generator returns in the end, and what it yields before."""

from collections.abc import Iterator
from typing import Any


def drained(generator: Iterator[Any]) -> tuple[Any, list[Any]]:
    found = []
    while True:
        try:
            found.append(next(generator))
        except StopIteration as end:
            return end.value, found
