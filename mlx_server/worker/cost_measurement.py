"""Measures the cost curve of each model while the engine is idle, and keeps it on disk.

Passes are short, and any command ends the measuring: what was measured of the curve is kept, and
the rest follows when the engine has been idle again for a while.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
import msgspec

from mlx_server.errors import public_message
from mlx_server.system.files import read_regular, replace_file
from mlx_server.worker.costs import CostCurve, MeasuredCurve
from mlx_server.worker.encoders import Encoder
from mlx_server.worker.kernels import device
from mlx_server.worker.kv_caches import make_caches
from mlx_server.worker.replay_model import ReplayModel
from mlx_server.worker.weights import arrays

log = logging.getLogger("mlx_server.engine")

IDLE_SECONDS = 5.0
"""How long the engine is idle before it measures: the first request often follows a load."""

STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
PIECES = (*STEPS, 128, 256)
"""The rows of the measured steps, and the tokens of the measured pieces."""

PASSES = 4
"""The passes of each size: the first one may compile kernels, and of the others the shortest
counts."""

MOST_SECONDS = 0.25
"""A request that arrives waits for the end of a pass. After one of this length, larger ones are not
measured."""

HOUR = 3600.0
"""No pass takes so long: a file that says so is damaged."""

GROWN = 16
"""The tokens by which the caches of measured passes grow; more would take memory for nothing."""

Kind = Literal["steps", "pieces"]
KINDS: tuple[Kind, ...] = ("steps", "pieces")


def can_be_measured(network: nn.Module) -> bool:
    """Whether its rows decode with caches and are no recording."""
    return not isinstance(network, ReplayModel | Encoder)


@dataclass
class Measurement:
    """What is measured of one model."""

    network: nn.Module
    file: Path
    most_rows: int
    times: dict[Kind, dict[int, float]] = field(default_factory=lambda: {"steps": {}, "pieces": {}})
    warm: set[tuple[Kind, int]] = field(default_factory=set)
    """The sizes whose first pass is done."""

    def __post_init__(self) -> None:
        steps: list[tuple[Kind, int]] = [("steps", n) for n in STEPS if n <= self.most_rows]
        sizes = steps + [("pieces", tokens) for tokens in PIECES]
        # in rounds, so that what another program disturbs is one pass of a size and not all
        self.left = [size for size in sizes for _ in range(2)] + sizes * (PASSES - 2)

    def step(self, clock: Callable[[], float]) -> None:
        """Computes one pass."""
        kind, size = self.left.pop(0)
        shape = (size, 1) if kind == "steps" else (1, size)
        began = clock()
        caches = make_caches(self.network)
        for cache in caches:
            if hasattr(cache, "step"):
                cache.step = GROWN
        logits = self.network(mx.ones(shape, mx.int32), cache=caches)
        states = [cache.state for cache in caches]
        mx.eval([logits, states] if shape[1] == 1 else states)
        seconds = clock() - began
        times = self.times[kind]
        is_warm = (kind, size) in self.warm
        if is_warm:
            times[size] = min(seconds, times.get(size, seconds))
        self.warm.add((kind, size))
        if is_warm and seconds > MOST_SECONDS:
            self.left = [each for each in self.left if each[0] != kind or each[1] < size]


class CostMeasurements:
    """The measurements of all models in memory."""

    def __init__(self, folder: Path | None, clock: Callable[[], float]) -> None:
        """folder: of the files; None measures nothing."""
        self._folder, self._clock = folder, clock
        self.curves: dict[str, CostCurve] = {}
        """The measured ones."""
        self._waiting: dict[str, Measurement] = {}
        self._begin: dict[str, Callable[[], Measurement]] = {}
        self._idle_since = clock() if folder else 0.0

    def loaded(self, model: str, path: Path, network: nn.Module, rows: int) -> None:
        """Reads a model's curve, or measures it later. rows: the most that decode together."""
        if self._folder is None:
            return
        file = self._folder / f"{_key(path, network)}.json"
        self._begin[model] = partial(Measurement, network, file, rows)
        if curve := _read(file):
            self.curves[model] = curve
        else:
            self.measure(model)

    def measure(self, model: str) -> None:
        """Measures a model, once more if its steps have come to take another time."""
        if model in self._begin:
            self._waiting.setdefault(model, self._begin[model]())

    def unloaded(self, model: str) -> None:
        for each in (self._begin, self._waiting, self.curves):
            each.pop(model, None)

    def interrupt(self) -> None:
        """Notes that there is something else to do."""
        if self._waiting:
            self._idle_since = self._clock()

    @property
    def pause(self) -> float | None:
        """Seconds until it measures, if the engine stays idle; None if all is measured."""
        if not self._waiting:
            return None
        return max(0.0, self._idle_since + IDLE_SECONDS - self._clock())

    def step(self) -> str | None:
        """Measures one pass. Returns the model whose curve it was the last one of."""
        model, measurement = next(iter(self._waiting.items()))
        try:
            measurement.step(self._clock)
        except Exception:  # a model that can't compute such passes keeps the curve that it has
            del self._waiting[model]
            raise
        if measurement.left:
            return None
        del self._waiting[model]
        mx.clear_cache()  # other processes and models need the memory
        self.curves[model] = MeasuredCurve(**measurement.times)
        try:
            measurement.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(measurement.file, msgspec.json.encode(measurement.times))
        except OSError as error:
            log.warning("a measured cost curve can't be kept: %s", public_message(error))
        return model


def _key(path: Path, network: nn.Module) -> str:
    """Stands for the model, its quantisation, the machine and MLX."""
    config = (path / "config.json").read_bytes()
    machine = {**mx.device_info()} if device() != "cpu" else platform.processor()
    types = sorted({str(array.dtype) for array in arrays(network)})
    facts = [machine, platform.machine(), os.cpu_count(), version("mlx"), types]
    return hashlib.sha256(config + json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _read(file: Path) -> MeasuredCurve | None:
    """Returns None if there is no such file, or one that is damaged."""
    with suppress(OSError, ValueError):
        tables = msgspec.json.decode(read_regular(file), type=dict[Kind, dict[int, float]])
        seconds = [table.values() for table in tables.values()]
        if all(map(tables.get, KINDS)) and all(
            min(each) > 0 and max(each) < HOUR for each in seconds
        ):
            return MeasuredCurve(tables["steps"], tables["pieces"])
    return None
