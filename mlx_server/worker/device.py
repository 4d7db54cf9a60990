"""What MLX computes on: a Mac's GPU by Metal, an NVIDIA GPU by CUDA, or the CPU."""

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
