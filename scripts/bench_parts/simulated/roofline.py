"""How long a forward pass takes on a Mac: a model of the machine, and no Mac.

Each product of a pass takes the longer of two times: that of reading the weights, as often as the
kernel of MLX reads them (see mlx_server/worker/kernels.py), and that of computing, two operations
for each weight and row, a tile's empty rows included. Attention takes the longer of reading keys
and values and of computing, and a pass a constant time to launch it. What is left out: what the
chip's caches save of further reads, kernels that don't reach this bound, the empty rows in tiles of
experts, heat, memory pressure, sliding windows. So the figures compare schedules with each other,
not Macs.

Machines. Bandwidth is what Apple's technical specifications of each chip say (support.apple.com,
largest GPU): M1 68, M1 Max 400, M2 100, M2 Max 400, M2 Ultra 800, M3 Max 400, M3 Ultra 819, M4 120,
M4 Pro 273, M4 Max 546, M5 153, M5 Max 614 GB/s. What prefill reaches in operations a second is
rounded from published prompt processing of models of 7B: llama.cpp's table (ggml-org/llama.cpp,
discussion 4167: some 118, 530, 180, 671, 1238, 760, 1470, 220, 440 and 890 tokens/s for M1, M1 Max,
M2, M2 Max, M2 Ultra, M3 Max, M3 Ultra, M4, M4 Pro and M4 Max, with 2 x 6.7e9 operations a token),
and a sixth more, as MLX is faster there. For M5 and M5 Max: their neural accelerators, by Apple's
"up to 4 times" M4 and M4 Max. M1 and M2 emulate bfloat16: with it prompts take 1.34 and steps 1.14
times as long as with float16 (others measured that), which is what the machines named so have.

Memory is the most that Apple sells with the chip.

Models. Layers, heads, widths and experts are those of each config.json (meta-llama/Llama-3.1-8B,
Qwen/Qwen3-32B, meta-llama/Llama-3.3-70B-Instruct, Qwen/Qwen3-30B-A3B, openai/gpt-oss-20b,
openai/gpt-oss-120b); bytes are those of the 4-bit checkpoints of mlx-community and of gpt-oss's own
MXFP4, split into experts and the rest. The head's bytes are vocabulary x width, with 4.5 bits a
weight (16 in gpt-oss).

`--machines FILE` adds others, in TOML:

    [machines.my-mac]
    bandwidth = 400e9      # bytes a second
    operations = 10e12     # a second, as far as prefill reaches
    launch = 0.002         # seconds of every pass
    memory = 64e9          # bytes
    chip = "applegpu_g16s" # as mx.device_info() names the architecture

    [models.my-model]
    dense_bytes = 4.6e9    # read for every token
    active = 8.0e9         # weights that a token is multiplied with
    layers = 32
    heads = 32
    kv_heads = 8
    head_dim = 128
    expert_bytes = 0       # of all experts together
    experts = 0            # their number in each layer
    used = 0               # of them, those that a token uses
    expert_mode = "affine" # or a mode such as mxfp4, or "" for weights in 16 bits; head_mode too
    hidden = 4096          # the width of the residual stream; heads x head_dim if it is left out
    head_bytes = 0.3e9     # of the dense bytes, those of the output head
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path

from mlx_server.worker.kernels import AFFINE, UNQUANTIZED, Chip, Product, time_of

WEIGHTS_PER_BYTE = {AFFINE: 8 / 4.5, "mxfp4": 8 / 4.25, "nvfp4": 8 / 4.5, "mxfp8": 8 / 8.25} | {
    UNQUANTIZED: 0.5
}

WIDE_TIMES, VOCABULARY = 3, 128_000
"""The width of an MLP over that of its model, and that of an output head: kernels are chosen by
whether they are above 4,096."""

EMULATED_PREFILL, EMULATED_STEP = 1.34, 1.14


@dataclass(frozen=True)
class Machine:
    bandwidth: float
    operations: float
    launch: float = 0.002
    memory: float = 0.0
    chip: str = "applegpu_g16s"
    float16: bool = False
    """Whether it computes in float16, where bfloat16 would be emulated."""

    @cached_property
    def known_chip(self) -> Chip | None:
        return Chip.of(self.chip)

    @property
    def emulates(self) -> bool:
        return bool(self.known_chip and self.known_chip.emulates_bfloat16 and not self.float16)


@dataclass(frozen=True)
class Model:
    dense_bytes: float
    active: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_bytes: float = 0.0
    experts: int = 0
    used: int = 0
    hidden: int = 0
    head_bytes: float = 0.0
    expert_mode: str = AFFINE
    head_mode: str = AFFINE

    @property
    def width(self) -> int:
        """The width of the residual stream."""
        return self.hidden or self.heads * self.head_dim

    @property
    def weights(self) -> float:
        """Bytes of all weights."""
        return self.dense_bytes + self.expert_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values, in 16 bits."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def attended(self) -> int:
        """Operations of attention for each token and each token before it."""
        return 4 * self.layers * self.heads * self.head_dim

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """Attention's and the MLP's matrices, the output head and the experts."""
        experts = max(1, self.experts)
        expert = WEIGHTS_PER_BYTE[self.expert_mode] * self.expert_bytes / experts
        head = WEIGHTS_PER_BYTE[self.head_mode] * self.head_bytes
        dense = max(0.0, self.active - head - self.used * expert)
        heads = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        attention = min(dense, 2.0 * self.layers * self.width * (heads + keys))
        nbytes = self.dense_bytes - self.head_bytes
        share = attention / dense if dense else 0.0
        wide = WIDE_TIMES * self.width
        return (
            Product(self.width, heads, share * nbytes, attention),
            Product(self.width, wide, (1 - share) * nbytes, dense - attention),
            Product(self.width, VOCABULARY, self.head_bytes, head, self.head_mode),
            Product(
                *(self.width, self.width, self.expert_bytes, expert, self.expert_mode),
                experts=self.experts,
                used=self.used,
            ),
        )


MACHINES = {
    "m1": Machine(68e9, 1.8e12, memory=16e9, chip="applegpu_g13g"),
    "m1-max": Machine(400e9, 8.3e12, memory=64e9, chip="applegpu_g13s"),
    "m2": Machine(100e9, 2.8e12, memory=24e9, chip="applegpu_g14g"),
    "m2-max": Machine(400e9, 10.5e12, memory=96e9, chip="applegpu_g14s"),
    "m2-ultra": Machine(800e9, 19.4e12, launch=0.003, memory=192e9, chip="applegpu_g14d"),
    "m3-max": Machine(400e9, 11.9e12, memory=128e9, chip="applegpu_g15s"),
    "m3-ultra": Machine(819e9, 22e12, launch=0.003, memory=512e9, chip="applegpu_g15d"),
    "m4": Machine(120e9, 3.5e12, memory=32e9, chip="applegpu_g16g"),
    "m4-pro": Machine(273e9, 7e12, memory=64e9),
    "m4-max": Machine(546e9, 14e12, memory=128e9),
    "m5": Machine(153e9, 14e12, memory=32e9, chip="applegpu_g17g"),
    "m5-max": Machine(614e9, 56e12, memory=128e9, chip="applegpu_g17s"),
}
MACHINES |= {
    f"{name}-float16": replace(machine, float16=True)
    for name, machine in MACHINES.items()
    if machine.emulates
}

MODELS = {
    "8b": Model(4.6e9, 8.0e9, 32, 32, 8, 128, head_bytes=0.30e9),
    "32b": Model(18.4e9, 32.8e9, 64, 64, 8, 128, hidden=5120, head_bytes=0.44e9),
    "70b": Model(39.7e9, 70.6e9, 80, 64, 8, 128, head_bytes=0.59e9),
    "30b-a3b": Model(
        *(1.1e9, 3.3e9, 48, 32, 4, 128),
        expert_bytes=16.0e9,
        experts=128,
        used=8,
        hidden=2048,
        head_bytes=0.18e9,
    ),
    "gpt-oss-20b": Model(
        *(1.6e9, 3.6e9, 24, 64, 8, 64),
        expert_bytes=10.5e9,
        experts=32,
        used=4,
        hidden=2880,
        head_bytes=1.16e9,
        expert_mode="mxfp4",
        head_mode=UNQUANTIZED,
    ),
    "gpt-oss-120b": Model(
        *(2.0e9, 5.1e9, 36, 64, 8, 64),
        expert_bytes=58.0e9,
        experts=128,
        used=4,
        hidden=2880,
        head_bytes=1.16e9,
        expert_mode="mxfp4",
        head_mode=UNQUANTIZED,
    ),
}

PAIRS = (
    "m1:8b",
    "m1-max:8b",
    "m2:8b",
    "m2-max:30b-a3b",
    "m2-ultra:32b",
    "m3-max:gpt-oss-20b",
    "m3-ultra:gpt-oss-120b",
    "m4:8b",
    "m4-pro:8b",
    "m4-pro:30b-a3b",
    "m4-max:gpt-oss-20b",
    "m4-max:gpt-oss-120b",
    "m5:8b",
    "m5-max:gpt-oss-120b",
)
"""The pairs of machine and model that `--simulate all` measures."""


def seconds(
    machine: Machine, model: Model, tokens: int, contexts: Sequence[int], padding: int = 0
) -> float:
    """Returns the seconds of a pass with so many tokens for each row. contexts: the tokens of each
    row, these included. padding: further rows, of zeros, that fill it to the next kernel."""
    rows, total = tokens * len(contexts), sum(contexts)
    bandwidth, operations = machine.bandwidth, machine.operations
    weights = bandwidth
    if machine.emulates:
        weights, operations = weights / EMULATED_STEP, operations / EMULATED_PREFILL
    products = _products(model, rows, machine.known_chip, weights, operations, padding)
    read, computed = model.kv_bytes * total, model.attended * tokens * total
    return machine.launch + products + max(read / bandwidth, computed / operations)


@lru_cache(maxsize=1 << 16)
def _products(
    model: Model, rows: int, chip: Chip | None, bandwidth: float, operations: float, padding: int
) -> float:
    """Passes at other contexts take as long."""
    return time_of(model.products, rows, chip, bandwidth, operations, padding)


@cache
def tables(own: Path | None = None) -> tuple[dict[str, Machine], dict[str, Model]]:
    """Returns the machines and models of this module and of the user's file."""
    found = tomllib.loads(own.read_text()) if own else {}
    machines = {name: Machine(**each) for name, each in found.get("machines", {}).items()}
    models = {name: Model(**each) for name, each in found.get("models", {}).items()}
    return MACHINES | machines, MODELS | models


def pair(named: str, own: Path | None = None) -> tuple[Machine, Model]:
    """Returns the machine and the model of `machine:model`. Raises KeyError, whose text lists the
    known ones."""
    machines, models = tables(own)
    machine, _, model = named.partition(":")
    if machine not in machines or model not in models:
        raise KeyError(
            f"{named!r} is no MACHINE:MODEL: machines are {', '.join(machines)}; models are "
            f"{', '.join(models)}."
        )
    return machines[machine], models[model]
