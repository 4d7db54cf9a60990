"""What the passes of a model cost: a curve by the number of their rows or tokens.

Until a curve is measured on this machine, it is what MLX's kernels read and compute. Its unit is
then the time of reading a byte; users of a curve compare its values, or scale them by what passes
take.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from mlx_server.worker.kernels import AFFINE, UNQUANTIZED, Chip, Product, time_of
from mlx_server.worker.mlx_lm_internals import (
    SHARDED,
    BatchKVCache,
    QuantizedSwitchLinear,
    SwitchLinear,
)
from mlx_server.worker.ragged_caches import leaves
from mlx_server.worker.weights import arrays

Table = Mapping[int, float]

MOST_ROWS, MOST_TOKENS = 256, 4096
"""Where curves end."""

WORTH_PADDING = 0.03
"""The share of a step that padding has to save."""


class CostCurve:
    """A table, by interpolation between its entries and along its last slope after them."""

    known: Table = MappingProxyType({})
    """The pieces whose seconds are measured, by their tokens."""

    def __init__(self, steps: Table, pieces: Table) -> None:
        """steps: the cost of a pass of one token for each of so many rows. pieces: of so many
        tokens of a prompt."""
        costs = _interpolated(steps, MOST_ROWS)
        self.pieces = _interpolated(pieces, MOST_TOKENS)
        """The cost of so many tokens of a prompt."""
        self.least = np.minimum.accumulate(costs[::-1])[::-1]
        """The cost of a step of so many rows, padded where that costs less."""
        self._padding = np.zeros(MOST_ROWS + 1, int)
        for rows in range(1, MOST_ROWS + 1):
            if self.least[rows] < (1 - WORTH_PADDING) * costs[rows]:
                self._padding[rows] = int(np.argmin(costs[rows:]))

    def piece(self, tokens: int) -> float:
        return float(self.pieces[min(tokens, MOST_TOKENS)])

    @property
    def is_flat(self) -> bool:
        """Whether it says nothing about how the cost of a piece depends on its tokens."""
        return bool(self.pieces[1] == self.pieces[-1])

    def step(self, rows: int) -> float:
        return float(self.least[min(rows, MOST_ROWS)])

    def padding(self, rows: int) -> int:
        """Returns how many rows to add to a step so that it takes a cheaper kernel."""
        return int(self._padding[min(rows, MOST_ROWS)])


def _interpolated(table: Table, most: int) -> NDArray[np.float64]:
    sizes = np.array(sorted(table), float)
    costs = np.array([table[size] for size in sorted(table)])
    values: NDArray[np.float64] = np.interp(np.arange(most + 1), sizes, costs)
    if len(sizes) > 1:
        slope = max(0.0, float((costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2])))
        end = int(sizes[-1])
        values[end:] = costs[-1] + slope * np.arange(len(values[end:]))
    return values


class MeasuredCurve(CostCurve):
    """In seconds, on this machine."""

    def __init__(self, steps: Table, pieces: Table) -> None:
        super().__init__(steps, pieces)
        self.known = pieces


FLAT = CostCurve({1: 1.0}, {1: 1.0})

LAUNCH = 1 << 30
"""The bytes that a Mac reads in the time that a step needs besides reading, some milliseconds."""

TILED = [
    *range(1, MOST_ROWS + 1),
    *(size for end in range(MOST_ROWS, MOST_TOKENS, 32) for size in (end + 1, end + 32)),
]
"""The sizes at which the cost of a pass steps up: each tile has 32 rows or 64."""


def curve_of(products: Sequence[Product], chip: Chip | None) -> CostCurve:
    """Returns what MLX's kernels read and compute."""

    def cost(rows: int) -> float:
        return LAUNCH + time_of(products, rows, chip)

    if chip is None:  # nothing is known about computing, which is most of what a piece takes
        return CostCurve({rows: cost(rows) for rows in range(1, MOST_ROWS + 1)}, {1: 1.0})
    table = {rows: cost(rows) for rows in TILED}
    return CostCurve(table, table)


DRIFT, SAMPLES, FADE = 1.5, 16, 0.8
"""A curve is out of date once steps take so many times as long for what it says, or as short, as
they did at first: after so many samples, by their fading mean."""


class Drift:
    """How the time of steps has changed since the curve was measured, in proportion to it."""

    def __init__(self) -> None:
        self._samples = 0
        self._first = self._mean = 0.0

    def add(self, ratio: float) -> None:
        """ratio: of a step's time to what the curve says."""
        self._mean = FADE * self._mean + (1 - FADE) * ratio if self._samples else ratio
        self._samples += 1
        if self._samples <= SAMPLES:
            self._first = self._mean

    @property
    def is_large(self) -> bool:
        change = self._mean / max(self._first, 1e-12)
        return self._samples > SAMPLES and not 1 / DRIFT <= change <= DRIFT


class StepCosts:
    """What a step of a model's rows costs, in the time of reading a byte."""

    is_alike = True
    """Whether all ranks have layers of the same kinds: what costs by layer may differ else."""

    def __init__(self, products: Sequence[Product], chip: Chip | None) -> None:
        self.curve = curve_of(products, chip)
        """By kernels, until a measured one is there."""
        self._one = self.curve.step(1)
        self.has_experts = any(product.experts for product in products)

    def weights(self, rows: int) -> float:
        """Returns the cost of all but the keys and values."""
        return self._one * self.curve.step(rows) / self.curve.step(1)

    def token(self, caches: Iterable[Any]) -> float:
        """Returns the bytes of a token in those caches of a batch that keep all tokens."""
        return sum(map(_token_bytes, leaves(caches)))

    def reading(self, caches: Iterable[Any], columns: int) -> float:
        """Returns the cost of reading so many columns of a batch's caches, as the curve has it."""
        return self.token(caches) * columns * self.curve.step(1) / self._one


class RankCosts(StepCosts):
    """Those of a model over several ranks, which are the same on each. They leave out what reading
    the keys and values costs, since ranks may have other layers."""

    def token(self, caches: Iterable[Any]) -> float:
        return 0.0


def step_costs(model: nn.Module) -> StepCosts:
    return StepCosts(products_of(model), this_chip())


def this_chip() -> Chip | None:
    if not mx.metal.is_available():
        return None
    return Chip.of(str(mx.device_info().get("architecture", "")))


USED_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
"""The names that mlx-lm's models give the number of experts for a token."""


def products_of(model: nn.Module) -> list[Product]:
    """Returns what a pass multiplies its rows with."""
    sums: dict[tuple[int, int, str, int], list[float]] = {}
    modules = dict(model.named_modules())
    has_head = any(name.endswith("lm_head") for name in modules)
    for module in modules.values():
        if not isinstance(module, MATRICES):
            continue
        nbytes = sum(array.nbytes for array in arrays(module))
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and has_head:
            continue  # a row of it is read for each token
        *experts, outputs, packed = module.weight.shape
        bits = getattr(module, "bits", None)
        mode = str(getattr(module, "mode", AFFINE)) if bits else UNQUANTIZED
        inputs = packed * 32 // bits if bits else packed
        each = sums.setdefault((inputs, outputs, mode, experts[0] if experts else 0), [0.0, 0.0])
        each[0] += nbytes
        each[1] += inputs * outputs
    return [
        Product(inputs, outputs, nbytes, weights, mode, experts, _used_experts(model, experts))
        for (inputs, outputs, mode, experts), (nbytes, weights) in sums.items()
    ]


MATRICES = (
    *(nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding),
    *(SwitchLinear, QuantizedSwitchLinear, *SHARDED),
)


def _used_experts(model: nn.Module, count: int) -> int:
    arguments = _fields(getattr(model, "args", None))
    texts = [arguments, _fields(arguments.get("text_config"))]
    counts = [int(text[name]) for text in texts for name in USED_EXPERTS if text.get(name)]
    return min(counts[0] if counts else count, count)


def _fields(arguments: Any) -> Mapping[str, Any]:
    """Returns the arguments of a model, or of a part of it: mlx-lm's models keep both kinds."""
    if isinstance(arguments, Mapping):
        return arguments
    return getattr(arguments, "__dict__", {})


def _token_bytes(cache: Any) -> float:
    is_whole = isinstance(cache, BatchKVCache) and getattr(cache, "window", None) is None
    if not is_whole or cache.keys is None:
        return 0.0
    rows, _, tokens, _ = tree_flatten(cache.keys)[0][1].shape
    return float(cache.nbytes / (rows * tokens))
