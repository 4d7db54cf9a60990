"""For measures inside of one process: a loaded network, and how long something takes it."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_server.worker import weights


def timed(work: Callable[[], Any]) -> float:
    """Seconds, until all is computed."""
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
