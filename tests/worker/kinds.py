"""Tiny random checkpoints of every kind of model whose cache or weights are special."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_server.worker.weights import model_classes

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,  # at these sizes the number of operations is what takes time
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Kind:
    name: str
    config: dict[str, Any]
    quantized: dict[str, Any] | None = None
    shards: int = 1

    def save(self, folder: Path) -> Path:
        config = {**SIZES, **self.config}
        model_class, args_class = model_classes(config)
        mx.random.seed(7)
        model = model_class(args_class.from_dict(config))
        _weaken_tied_embeddings(model)
        if self.quantized:
            nn.quantize(model, **self.quantized, class_predicate=_fits)
            config["quantization"] = self.quantized
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        weights = tree_flatten(model.parameters())
        for i in range(self.shards):
            name = f"model-{i + 1:05}-of-{self.shards:05}" if self.shards > 1 else "model"
            part = dict(weights[i :: self.shards])
            mx.save_safetensors(str(folder / f"{name}.safetensors"), part, {"format": "mlx"})
        return folder


def _weaken_tied_embeddings(model: nn.Module) -> None:
    """Otherwise a model whose head is its embedding says the last token again and again, whatever
    its cache holds."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    sizes = {len(embedding.weight) for embedding in embeddings}
    if not any(isinstance(m, nn.Linear) and len(m.weight) in sizes for m in model.modules()):
        for embedding in embeddings:
            embedding.weight *= 0.02


def _fits(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 64 == 0


GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
    "rope_scaling": None,
    "layer_types": ["sliding_attention", "full_attention"],
}
LLAMA = {"model_type": "llama"}
MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "num_heads": 4,
    "head_dim": 32,
    "state_size": 16,
    "conv_kernel": 4,
    "n_groups": 1,
    "expand": 2,
    "chunk_size": 64,
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "time_step_limit": [0.0, 100.0],
    "time_step_rank": 4,
}
CONVOLUTIONS = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "num_hidden_layers": 4,  # with two, a wrong state changes hardly an answer
    "full_attn_idxs": [1, 3],
}
BLOCKS = {
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}

KINDS = (
    Kind("llama", LLAMA),
    Kind("llama-4bit", LLAMA, {"group_size": 32, "bits": 4}),
    Kind("llama-8bit", LLAMA, {"group_size": 64, "bits": 8}),
    Kind("llama-mxfp4", LLAMA, {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    Kind("llama-sharded", LLAMA, shards=3),
    Kind("gpt-oss", GPT_OSS),
    Kind(
        "gemma3",
        {
            "model_type": "gemma3_text",
            "sliding_window": 32,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": 32,
        },
    ),
    Kind("mamba2", MAMBA2),
    Kind("lfm2", {"model_type": "lfm2", **CONVOLUTIONS, **BLOCKS}),
)
