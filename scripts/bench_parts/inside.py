"""Helps to measure inside one process: it loads a network, and times a call."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_server.worker import weights


def timed(work: Callable[[], Any]) -> float:
    """Returns the seconds until all arrays are computed."""
    mx.synchronize()
    began = perf_counter()
    work()
    mx.synchronize()
    return perf_counter() - began


def network(folder: Path) -> Any:
    loading = weights.load(folder)
    while True:
        try:
            next(loading)
        except StopIteration as end:
            return end.value
