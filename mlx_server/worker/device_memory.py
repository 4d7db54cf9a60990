"""MLX's memory limit, and how freed memory returns to the system."""

import ctypes
import gc
import sys
from contextlib import suppress

import mlx.core as mx

MOST_FREED, FREED_SHARE = 32 << 20, 0.01
"""Bounds on the freed buffers that MLX keeps on a CPU, where they do not count against its memory
limit: MLX's own default in bytes, and a share of the limit."""


def limit_memory(max_bytes: int) -> None:
    mx.set_memory_limit(max_bytes)
    if not mx.metal.is_available():  # with Metal, the limit includes freed buffers
        mx.set_cache_limit(min(MOST_FREED, int(FREED_SHARE * max_bytes)))


def release_memory() -> None:
    """Returns the memory of unloaded weights to the system, instead of keeping it for reuse."""
    gc.collect()
    mx.clear_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
