"""How long a forward pass takes on a Mac: a model of the machine, and no Mac.

A pass takes the longer of two times, and a constant one to launch it: that of reading from memory
(the weights that every token needs, the experts that at least one of the tokens is sent to, the
keys and values of the context) and that of computing (two operations for each active weight and
token, and attention). What is left out: kernels that don't reach this bound, heat, memory pressure,
sliding windows. So the figures compare schedules with each other, not Macs.

Machines. Bandwidth is what Apple's technical specifications of each chip say (support.apple.com,
largest GPU): M4 120, M4 Pro 273, M4 Max 546, M3 Ultra 819, M5 153 GB/s. What prefill reaches in
operations a second is rounded from published prompt processing of models of 7B: llama.cpp's table
(ggml-org/llama.cpp, discussion 4167: some 220, 440, 890 and 1470 tokens/s for M4, M4 Pro, M4 Max
and M3 Ultra, with 2 x 6.7e9 operations a token), and a sixth more, as MLX is faster there. For M5:
its neural accelerators, by Apple's "up to 4 times" M4.

Memory is the most that Apple sells with the chip.

Models. Layers, heads and widths are those of each config.json (meta-llama/Llama-3.1-8B,
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

    [models.my-model]
    dense_bytes = 4.6e9    # read for every token
    active = 8.0e9         # weights that a token is multiplied with
    layers = 32
    heads = 32
    kv_heads = 8
    head_dim = 128
    expert_bytes = 0       # of all experts together
    expert_share = 0       # of them, what one token uses
    hidden = 4096          # the width of the residual stream; heads x head_dim if it is left out
    head_bytes = 0.3e9     # of the dense bytes, those of the output head
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    bandwidth: float
    operations: float
    launch: float = 0.002
    memory: float = 0.0


@dataclass(frozen=True)
class Model:
    dense_bytes: float
    active: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_bytes: float = 0.0
    expert_share: float = 0.0
    hidden: int = 0
    head_bytes: float = 0.0

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


MACHINES = {
    "m4": Machine(120e9, 3.5e12, memory=32e9),
    "m4-pro": Machine(273e9, 7e12, memory=64e9),
    "m4-max": Machine(546e9, 14e12, memory=128e9),
    "m3-ultra": Machine(819e9, 22e12, launch=0.003, memory=512e9),
    "m5": Machine(153e9, 14e12, memory=32e9),
}

MODELS = {
    "8b": Model(4.6e9, 8.0e9, 32, 32, 8, 128, head_bytes=0.30e9),
    "32b": Model(18.4e9, 32.8e9, 64, 64, 8, 128, hidden=5120, head_bytes=0.44e9),
    "70b": Model(39.7e9, 70.6e9, 80, 64, 8, 128, head_bytes=0.59e9),
    "30b-a3b": Model(
        *(1.1e9, 3.3e9, 48, 32, 4, 128),
        expert_bytes=16.0e9,
        expert_share=8 / 128,
        hidden=2048,
        head_bytes=0.18e9,
    ),
    "gpt-oss-20b": Model(
        *(1.6e9, 3.6e9, 24, 64, 8, 64),
        expert_bytes=10.5e9,
        expert_share=4 / 32,
        hidden=2880,
        head_bytes=1.16e9,
    ),
    "gpt-oss-120b": Model(
        *(2.0e9, 5.1e9, 36, 64, 8, 64),
        expert_bytes=58.0e9,
        expert_share=4 / 128,
        hidden=2880,
        head_bytes=1.16e9,
    ),
}

PAIRS = (
    "m4:8b",
    "m4-pro:8b",
    "m4-pro:30b-a3b",
    "m4-max:gpt-oss-20b",
    "m4-max:gpt-oss-120b",
    "m3-ultra:gpt-oss-120b",
)
"""The pairs of machine and model that `--simulate all` measures."""


def seconds(machine: Machine, model: Model, tokens: int, contexts: Sequence[int]) -> float:
    """Returns the seconds of a pass with so many tokens for each row. contexts: the tokens of each
    row, these included."""
    count = tokens * len(contexts)
    experts = model.expert_bytes * (1 - (1 - model.expert_share) ** count)
    read = model.dense_bytes + experts + model.kv_bytes * sum(contexts)
    computed = 2 * model.active * count + model.attended * tokens * sum(contexts)
    return max(read / machine.bandwidth, computed / machine.operations) + machine.launch


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
