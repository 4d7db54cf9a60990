"""Helps to measure inside one process: it times a call."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import mlx.core as mx


def timed(work: Callable[[], Any]) -> float:
    """Returns the seconds until all arrays are computed."""
    mx.synchronize()
    began = perf_counter()
    work()
    mx.synchronize()
    return perf_counter() - began
