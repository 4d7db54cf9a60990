"""Loads models a piece at a time: wires memory, reads weights, compiles kernels."""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_server.engine.messages import ModelLoading
from mlx_server.engine.wired_memory import next_limit, parse_wired, wiring
from mlx_server.worker import weights
from mlx_server.worker.batch import Batch
from mlx_server.worker.quantized_kv import set_kv_bits
from mlx_server.worker.read_rate import WeightReadPace
from mlx_server.worker.share import WHOLE, WholeModel
from mlx_server.worker.warm_up import warm_up

log = logging.getLogger("mlx_server.engine")

Progress = Generator[tuple[int, int] | None, None, nn.Module]
"""Yields (bytes read, total bytes), or None after a warm-up step; returns the model."""


def load(
    path: Path,
    pace: WeightReadPace,
    wire: Callable[[int], None],
    concurrency: int,
    kv_bits: int | None = None,
    share: WholeModel = WHOLE,
    clock: Callable[[], float] = time.perf_counter,
) -> Progress:
    """wire: called with the total bytes of the weights before they are read."""
    network = yield from share.together(_wired(weights.load(path, pace, share.cut), wire))
    set_kv_bits(network, kv_bits)
    # A separate batch leaves nothing in the prompt cache and no measurement in the budget.
    for _ in warm_up(Batch(network, concurrency=concurrency), concurrency, clock):
        yield None
    return network


def _wired(reading: weights.Reading, wire: Callable[[int], None]) -> weights.Reading:
    try:
        progress = next(reading)
    except StopIteration as end:  # a model without weights
        network: nn.Module = end.value
        return network
    wire(progress[1])
    yield progress
    return (yield from reading)


class WiredLimit:
    """The wired memory limit of this process; `wiring` decides when it grows."""

    def __init__(self, wired: str) -> None:
        self._wired = parse_wired(wired)
        self._limit = 0

    def before_reading(self, nbytes: int, present: Iterable[nn.Module], *, rows: bool) -> None:
        """nbytes: the size of the weights to read. rows: whether any row is running."""
        if not mx.metal.is_available():
            return
        working_set = int(mx.device_info()["max_recommended_working_set_size"])
        total = nbytes + sum(a.nbytes for model in present for a in weights.arrays(model))
        wanted = wiring(self._wired, total, working_set)
        limit = next_limit(self._limit, wanted.limit, rows=rows)
        if limit == self._limit:
            return
        try:
            mx.clear_cache()  # freed buffers would be wired too
            mx.set_wired_limit(limit)
            self._limit = limit
            log.info("wired %d MB of weights: %s", limit // 10**6, wanted.why)
        except (RuntimeError, ValueError) as error:  # for example before macOS 15
            log.warning("the weights can't be wired: %s", error)


@dataclass(frozen=True)
class _Load:
    path: Path
    progress: Progress


class ModelLoads:
    """The loads in progress, by model."""

    def __init__(
        self,
        wired: str,
        concurrency: int,
        batches: Mapping[str, Batch],
        share: WholeModel,
        clock: Callable[[], float],
    ) -> None:
        """batches: those of all models in memory, which the caller changes."""
        self._share, self._clock = share, clock
        self._wired = WiredLimit(wired)
        self._pace = WeightReadPace()
        self._concurrency = concurrency
        self._batches = batches
        self._loads: dict[str, _Load] = {}
        self.is_warming = False
        """Whether the last piece of a load was a warm-up step, rather than weights."""

    def __bool__(self) -> bool:
        return bool(self._loads)

    @property
    def models(self) -> list[str]:
        return list(self._loads)

    @property
    def doing(self) -> str:
        """The work of the first load."""
        return f"{'warming up' if self.is_warming else 'loading'} {self.models[0]}"

    def path(self, model: str) -> Path:
        return self._loads[model].path

    def begin(self, model: str, path: Path, kv_bits: int | None) -> None:
        progress = load(
            path, self._pace, self._wire, self._concurrency, kv_bits, self._share, self._clock
        )
        self._loads[model] = _Load(path, progress)

    def end(self, model: str) -> bool:
        """Returns whether the model was being loaded."""
        return self._loads.pop(model, None) is not None

    def step(self, model: str) -> tuple[list[ModelLoading], nn.Module | None]:
        """Computes a piece; returns its report, and the model after the last piece."""
        self._pace.while_decoding = any(self._batches.values())
        try:
            progress = next(self._loads[model].progress)
        except StopIteration as end:
            return [], end.value
        self.is_warming = progress is None
        return ([ModelLoading(model, *progress)] if progress else []), None

    def _wire(self, nbytes: int) -> None:
        present = [batch.model for batch in self._batches.values()]
        self._wired.before_reading(nbytes, present, rows=any(self._batches.values()))
