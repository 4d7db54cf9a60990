"""Random networks of mlx-lm's own classes, and prompts for them."""

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import llama, qwen3_moe

from mlx_server.worker.kernels import has_gpu

VOCABULARY = 2048
"""The tokens of prompts; large networks have more."""

SIZES: dict[bool, dict[str, int]] = {
    False: {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "vocab_size": 32_000,
    },
    True: {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "intermediate_size": 512,
        "vocab_size": VOCABULARY,
    },
}
"""The sizes of some 1.2 billion weights, and of tiny ones."""

PRECISIONS: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "float16": None,
    "affine4": {"bits": 4, "group_size": 64, "mode": "affine"},
    "affine8": {"bits": 8, "group_size": 64, "mode": "affine"},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}


def network(kind: str, precision: str, small: bool) -> Any:
    """kind: `dense`, or `experts` for a mixture of 32 of which 4 compute a token."""
    mx.random.seed(0)
    size = SIZES[small]
    common: dict[str, Any] = {
        **size,
        "num_attention_heads": size["hidden_size"] // 64,
        "num_key_value_heads": max(1, size["hidden_size"] // 256),
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
    }
    made: nn.Module
    if kind == "dense":
        made = llama.Model(llama.ModelArgs(model_type="llama", **common))
    else:
        experts = {"num_experts": 32, "num_experts_per_tok": 4, "decoder_sparse_step": 1}
        made = qwen3_moe.Model(
            qwen3_moe.ModelArgs(
                model_type="qwen3_moe",
                mlp_only_layers=[],
                moe_intermediate_size=size["intermediate_size"] // 8,
                norm_topk_prob=True,
                **experts,
                **common,
            )
        )
    # a CPU computes slowly in half precision, and not all of it
    half = precision != "float32" and (has_gpu() or precision == "float16")
    made.update(tree_map(lambda a: a.astype(mx.float16) if half else a, made.parameters()))
    if how := PRECISIONS[precision]:
        nn.quantize(made, **how)
    mx.eval(made.parameters())
    return made


def prompt(length: int, seed: int) -> list[int]:
    dice = random.Random(seed)  # noqa: S311  no secret
    return [dice.randrange(VOCABULARY) for _ in range(length)]
