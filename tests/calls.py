"""Counts what code does, where its time would depend on the machine."""

import sys
from collections.abc import Callable
from typing import Any


def calls_of(run: Callable[[], Any]) -> int:
    """Returns the number of functions that are called, those of C included."""
    count = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count
