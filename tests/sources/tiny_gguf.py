"""What a tiny GGUF file is made of."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

WIDTH, INNER, HEADS, KV_HEADS = 32, 64, 4, 2


CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = CONTROL + sorted(ByteLevel.alphabet()) + ["hi", "12", "Ġ1"]
MERGES = ["h i", "1 2", "Ġ 1"]


def nothing(what: str, done: int, total: int) -> None: ...


def interleaved(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows as llama.cpp stores them, one by one: the two halves of each head take turns."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
