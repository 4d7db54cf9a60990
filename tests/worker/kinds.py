"""Tiny random checkpoints: one of every architecture of mlx-lm that has a family here, and those
whose weights are kept in other ways."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import yaml
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


FILE = Path(__file__).with_name("architectures.yaml")
CONFIGS: dict[str, dict[str, Any]] = yaml.load(FILE.read_text("utf-8"), yaml.CSafeLoader)["configs"]
WINDOW = 32
"""The tokens of sliding windows."""
LLAMA = CONFIGS["llama"]

ARCHITECTURES = tuple(Kind(name, config) for name, config in CONFIGS.items())
STORED = (
    Kind("llama-4bit", LLAMA, {"group_size": 32, "bits": 4}),
    Kind("llama-8bit", LLAMA, {"group_size": 64, "bits": 8}),
    Kind("llama-mxfp4", LLAMA, {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    Kind("llama-sharded", LLAMA, shards=3),
)
KINDS = {kind.name: kind for kind in (*ARCHITECTURES, *STORED)}

CACHES = ("llama", "gpt_oss", "gemma3_text", "mamba2", "lfm2")
"""One of each kind of cache: all keys and values, windows, and states with and without them."""
ONE_OF_EACH = ("llama", "gpt_oss", "mamba2", "qwen3_5")
"""As few as have all of these."""
