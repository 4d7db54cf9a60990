"""The models that are measured, each a folder of float32 weights that every contender loads.

Their answers, but for those of `real`, never end early: the output head gives the tokens that end
one a logit of zero.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mlx_server.sources.cache import cache_dir
from mlx_server.sources.demo import demo_checkpoint

FORMAT = 1
"""The version of the files; raise it whenever the files' contents change."""

END_TOKENS = [0, 1, 2]
"""The end tokens of the demo model's tokenizer, which both models have."""

Weights = dict[str, NDArray[np.float32]]
Config = dict[str, Any]

TINY: Config = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


SIMULATED: Config = {
    **TINY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 131_072,
}


def model_folder(name: str) -> Path:
    """Returns the folder of one of MODELS. It is made if it does not exist."""
    folder = cache_dir() / "bench" / f"{name}-{FORMAT}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as work:
            made = Path(work) / "checkpoint"
            _write(made, MODELS[name])
            made.rename(folder)
    return folder


def _write(folder: Path, make: Callable[[Path, Config], Weights]) -> None:
    demo = demo_checkpoint(lambda *progress: None)
    shutil.copytree(demo, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((demo / "config.json").read_text())
    weights = make(demo / "model.safetensors", config)
    config["torch_dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})


def _real(checkpoint: Path, config: Config) -> Weights:
    """The answers of this one do end. Those of `demo` can't be trained: the loss of an end token
    whose embedding is zero has no gradient."""
    return {name: array.astype(np.float32) for name, array in load_file(checkpoint).items()}


def _demo(checkpoint: Path, config: Config) -> Weights:
    weights = _real(checkpoint, config)
    assert config["tie_word_embeddings"]
    weights["model.embed_tokens.weight"][END_TOKENS] = 0
    return weights


def _tiny(_: Path, config: Config) -> Weights:
    config |= TINY
    return _random(config)


def _random(config: Config) -> Weights:
    random = np.random.default_rng(0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv, vocabulary = config["num_key_value_heads"] * config["head_dim"], config["vocab_size"]

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        values = random.standard_normal((rows, columns), np.float32)
        return values * np.float32(2 * columns**-0.5)

    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(vocabulary, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "input_layernorm": np.ones(hidden, np.float32),
            "self_attn.q_proj": matrix(hidden, hidden),
            "self_attn.k_proj": matrix(kv, hidden),
            "self_attn.v_proj": matrix(kv, hidden),
            "self_attn.o_proj": matrix(hidden, hidden),
            "post_attention_layernorm": np.ones(hidden, np.float32),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
        }
        weights |= {f"model.layers.{layer}.{part}.weight": array for part, array in parts.items()}
    weights["lm_head.weight"][END_TOKENS] = 0
    return weights


def _simulated(checkpoint: Path, config: Config) -> Weights:
    """Makes a model with next to no weights, and room for long prompts."""
    config |= SIMULATED
    return _random(config)


MODELS: dict[str, Callable[[Path, Config], Weights]] = {
    "demo": _demo,
    "real": _real,
    "tiny": _tiny,
    "simulated": _simulated,
}
