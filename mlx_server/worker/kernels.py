"""What MLX computes on, a Mac's GPU by Metal, an NVIDIA GPU by CUDA, or the CPU, and which kernel
multiplies rows with a matrix of weights, and how often it reads the weights.

Below a limit by chip and matrix, a quantised matrix is multiplied with vectors. On M1 and M2 each
row reads affine weights again; on later chips, and in the fp modes, up to five rows share a read.
From the limit on, a tile of rows shares a read, and takes the time of a full tile however few rows
it has. Experts are read for each row that is sent to them, until several are sorted into a tile.

The facts are those of MLX 0.32: mlx/backend/metal/quantized.cpp (get_qmv_batch_limit, use_qmv_wide,
qmv_wide, qmm, GatherQMM), matmul.cpp (gemv_wide_config, GatherMM) and device.cpp (is_nax_available;
an architecture is a generation and a letter). mlx-lm's switch_layers.py sorts the experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

import mlx.core as mx

CUDA_SHARE = 0.9
"""The share of an NVIDIA GPU's memory for weights, caches and the computation. MLX's own limit is
0.95 of it; the rest is the context's and the libraries'."""


def device() -> Literal["metal", "cuda", "cpu"]:
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else "cpu"


def has_gpu() -> bool:
    return device() != "cpu"


def recommended_bytes() -> int | None:
    """The GPU's memory that programs may use; None without a GPU."""
    match device():
        case "metal":
            return int(mx.device_info()["max_recommended_working_set_size"])
        case "cuda":
            return int(CUDA_SHARE * int(mx.device_info()["total_memory"]))
        case "cpu":
            return None


AFFINE, UNQUANTIZED = "affine", ""


@dataclass(frozen=True)
class Chip:
    generation: int
    """13 for M1, 14 for M2, to 17 for M5."""
    letter: str = "g"
    """p: a phone, g: the plain chip, s: Pro or Max, d: Ultra."""

    @classmethod
    def of(cls, architecture: str) -> "Chip | None":
        """architecture: as `mx.device_info()` has it, such as applegpu_g16s; None if it is no Apple
        GPU."""
        name, _, chip = architecture.partition("_g")
        return cls(int(chip[:-1]), chip[-1]) if name == "applegpu" else None

    @property
    def has_accelerators(self) -> bool:
        """Whether tiles are multiplied by neural accelerators (NAX)."""
        return self.generation >= (18 if self.letter == "p" else 17)

    @property
    def emulates_bfloat16(self) -> bool:
        return self.generation < 15

    @property
    def operations_per_byte(self) -> float:
        """The operations of a tile in the time of reading a byte: what published prompt processing
        of dense 7B models gives, over the bandwidth. All chips of an age have nearly the same."""
        return 90.0 if self.has_accelerators else 26.0


@dataclass(frozen=True)
class Product:
    """The matrices of a model that a pass multiplies its rows with and that have the same shape."""

    inputs: int
    outputs: int
    nbytes: float
    """The bytes of all of these matrices, and of all experts."""
    weights: float
    """The weights that a row is multiplied with by one expert, or by the matrices without any."""
    mode: str = AFFINE
    experts: int = 0
    used: int = 0
    """The number of experts that each row is sent to."""


@dataclass(frozen=True)
class Kernel:
    name: str
    reads: float
    """How often it reads the product's bytes."""
    rows: float
    """The rows that it computes, those that fill a tile included; for experts the pairs of a row
    and an expert."""


WIDE = 5
"""The most rows that share a read as vectors."""

SORTED = 64
"""The pairs of a row and an expert from which mlx-lm sorts them by expert."""

TILED = 4
"""The sorted pairs for each expert from which an expert is read once for all of them."""


def vector_limit(chip: Chip, inputs: int, outputs: int) -> int:
    """Returns the rows from which a quantised matrix is multiplied by tiles."""
    is_ultra = chip.letter == "d"
    if chip.generation >= 17 and not is_ultra:
        limits = 33, 25, 13
    elif chip.generation >= 15 and not is_ultra:
        limits = 13, 15, 13
    elif is_ultra:
        limits = 32, 18, 12
    else:
        limits = (14, 10, 6) if chip.generation >= 13 else (18, 12, 10)
    size = max(inputs, outputs)
    return limits[(size > 2048) + (size > 4096)]


def kernel(chip: Chip | None, product: Product, rows: int) -> Kernel:
    """chip: None where nothing is known about kernels: then all rows share a read."""
    if product.experts:
        return _expert_kernel(chip, product, rows)
    if chip is None:
        return Kernel("any", 1, rows)
    if product.mode == UNQUANTIZED:
        return _unquantized_kernel(chip, rows)
    if rows < vector_limit(chip, product.inputs, product.outputs):
        if rows > 1 and (product.mode != AFFINE or chip.generation >= 15):
            return Kernel("qmv_wide", ceil(rows / WIDE), rows)
        return Kernel("qmv", rows, rows)
    return _tiles("qmm", rows, 64 if chip.has_accelerators and rows > 32 else 32)


def _tiles(name: str, rows: int, size: int) -> Kernel:
    return Kernel(name, ceil(rows / size), size * ceil(rows / size))


def _unquantized_kernel(chip: Chip, rows: int) -> Kernel:
    if rows == 1:
        return Kernel("gemv", 1, 1)
    if chip.generation >= 15 and rows <= 3 * WIDE:
        return Kernel("gemv_wide", ceil(rows / WIDE), rows)
    return _tiles("gemm", rows, 64 if chip.has_accelerators and rows > 32 else 32)


def _expert_kernel(chip: Chip | None, product: Product, rows: int) -> Kernel:
    pairs, experts = rows * product.used, product.experts
    reached = experts * (1 - (1 - product.used / experts) ** rows)
    if chip is None:
        return Kernel("any", reached / experts, pairs)
    is_quantized = product.mode != UNQUANTIZED
    if pairs < SORTED or (is_quantized and pairs // experts < TILED):
        return Kernel("gather_qmv" if is_quantized else "gather_mv", pairs / experts, pairs)
    # An expert has few tiles one after the other, and is small enough to stay in the chip's cache.
    name = "gather_qmm_rhs" if is_quantized else "gather_mm_rhs"
    return Kernel(name, min(pairs, reached) / experts, pairs)


def time_of(
    products: Iterable[Product],
    rows: int,
    chip: Chip | None,
    bandwidth: float = 1.0,
    operations: float | None = None,
    padding: int = 0,
) -> float:
    """Returns what the products of a pass take, which is for each the longer of reading and
    computing: in seconds, or without a bandwidth in the time of reading a byte. padding: the
    further rows that all matrices but experts get."""
    if operations is None:
        operations = bandwidth * (chip.operations_per_byte if chip else inf)
    return sum(
        max(product.nbytes * each.reads / bandwidth, 2 * product.weights * each.rows / operations)
        for product in products
        for each in [kernel(chip, product, rows if product.experts else rows + padding)]
    )
