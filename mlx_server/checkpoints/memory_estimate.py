"""Estimates from its files, before it is loaded, how much memory a model will take.

An estimate may be too high but not too low: unknown values are assumed to be large.
"""

import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlx_server import limits
from mlx_server.checkpoints.safetensors_headers import BadHeader, read_header_of
from mlx_server.errors import ModelUnusable

UNKNOWN_LAYERS, UNKNOWN_HEAD = 64, 256
"""Number of layers and head dimension of a config without them."""

STEP = 256
"""Number of tokens by which mlx-lm's KV caches grow."""

STATE_BYTES = 4
"""Bytes per value of a recurrent state, mostly float32 regardless of the model's type."""

NOT_OF_MLX = frozenset({"F64", "F8_E5M2"})

COUNT = re.compile("(layer|expert|block|loop)s?$")

Kind = Literal["full", "sliding", "state", "both", "none"]

KINDS: dict[str, Kind] = {
    "sliding_attention": "sliding",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
    "recurrent": "state",
    "M": "state",
    "L": "sliding",
    "mlp": "none",
    "moe": "none",
    "-": "none",
    "E": "none",
}
"""Kinds of layers by their names in configs. Layers with other names have full attention."""

SLIDING = frozenset((
    "afmoe", "cohere2", "exaone4", "exaone_moe", "gear", "gemma3_text", "gemma3n_text",
    "gemma4_text", "gpt_oss", "laguna", "llama", "mellum", "ministral3", "mistral",
    "muse_glimmer", "olmo3", "spark2_5",
))  # fmt: skip
"""Model types whose sliding layers mlx-lm caches as a window; for others it caches all tokens."""

PATTERNS = {
    "cohere2": 4,
    "gemma3_text": 6,
    "gemma4_text": 5,
    "gpt_oss": 2,
    "muse_glimmer": 4,
    "olmo3": 4,
    "spark2_5": 4,
}
"""Default of `sliding_window_pattern`: one layer in so many is full, the others slide."""

DEFAULTS: dict[str, dict[str, int]] = {
    "deepseek_v32": {"index_head_dim": 128},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "glm_moe_dsa": {"index_head_dim": 128},
}
"""Values of settings that configs may omit, by model type."""

EVERY_LAYER: dict[str, Kind] = {
    "mamba": "state",
    "falcon_mamba": "state",
    "mamba2": "state",
    "rwkv7": "state",
    "falcon_h1": "both",
    "plamo2": "both",
}

EXPANDED = frozenset(("deepseek_v2", "minicpm3", "youtu_llm"))
"""Model types whose latent attention is cached as full heads."""

CACHES = {"iquestloopcoder": 2, "longcat_flash": 2, "longcat_flash_ngram": 2}
"""Number of caches per layer, if it is not one."""

LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
LAYER_TYPES = ("layer_types", "layers_block_type", "hybrid_override_pattern", "block_types")
HIDDEN = ("hidden_size", "hidden_dim", "d_model", "n_embd", "model_dim", "dim")
HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "attn_config.kv_n_heads")
HEAD_DIM = ("head_dim", "kv_channels", "hidden_size_per_head")
WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size")
INDEX = ("index_head_dim", "sparse_attention_config.sparse_index_dim")


@dataclass(frozen=True)
class StateShape:
    """Names of the settings from which the size of a recurrent layer's state follows."""

    channels: tuple[str, ...]
    """Settings whose product is the number of channels."""
    per_channel: str = ""
    kernel: str = ""
    groups: str = ""


STATES = (
    StateShape(
        ("linear_num_value_heads", "linear_value_head_dim"),
        "linear_key_head_dim",
        "linear_conv_kernel_dim",
        "linear_num_key_heads",
    ),
    StateShape(
        ("linear_attn_config.num_heads", "linear_attn_config.head_dim"),
        "linear_attn_config.head_dim",
        "linear_attn_config.short_conv_kernel_size",
        "linear_attn_config.num_heads",
    ),
    StateShape(
        ("mamba_n_heads", "mamba_d_head"), "mamba_d_state", "mamba_d_conv", "mamba_n_groups"
    ),
    StateShape(("mamba_num_heads", "mamba_head_dim"), "ssm_state_size", "conv_kernel", "n_groups"),
    StateShape(("mamba_num_heads", "hidden_size_per_head"), "mamba_d_state", "mamba_d_conv"),
    StateShape(("mamba_expand", "hidden_size"), "mamba_d_state", "mamba_d_conv"),
    StateShape(("num_heads", "head_dim"), "state_size", "conv_kernel", "n_groups"),
    StateShape(("intermediate_size",), "state_size", "conv_kernel"),
    StateShape(("hidden_size",), kernel="conv_L_cache"),
    StateShape(("num_attention_heads", "head_dim"), "head_dim"),
    StateShape(("hidden_size",), "head_dim"),
)
"""The first shape whose settings the config has is used."""


@dataclass(frozen=True)
class KvCost:
    """Bytes that one sequence occupies in a model's caches."""

    per_token: int
    windowed_per_token: int = 0
    window: int = 0
    fixed: int = 0

    def for_tokens(self, n: int) -> int:
        # A cache grows in steps, which need not begin at multiples of STEP.
        slots = n + STEP - 1
        windowed = self.windowed_per_token * min(slots, self.window)
        return self.per_token * slots + windowed + self.fixed

    def tokens_in(self, nbytes: int, at_most: int) -> int:
        """How many tokens fit into `nbytes`, up to `at_most`."""
        return max(0, bisect_right(range(at_most + 1), nbytes, key=self.for_tokens) - 1)


def weights_bytes(path: Path, upcast: bool) -> int:
    """Memory of the weights; with `upcast`, half precision is loaded as float32."""
    return sum(_tensor_bytes(file, upcast) for file in _weight_files(path))


def _weight_files(path: Path) -> list[Path]:
    """The weight files that mlx-lm reads. Raises ModelUnusable if one is missing."""
    files = sorted(path.glob("model*.safetensors"))
    listed = _listed_files(path / "model.safetensors.index.json")
    missing = sorted(listed - {file.name for file in files})
    if missing or not files:
        name = missing[0] if missing else "model.safetensors"
        raise _unusable(path / name, "is missing")
    return files


def _listed_files(index: Path) -> set[str]:
    if not index.is_file():
        return set()
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        return {shard for shard in shards if Path(shard).match("model*.safetensors")}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _unusable(index, "is damaged") from None


def _tensor_bytes(file: Path, upcast: bool) -> int:
    try:
        tensors = read_header_of(file, limits.CHECKPOINT_HEADER_BYTES.value).tensors
    except OSError as error:
        raise _unusable(file, f"cannot be read ({error.strerror})") from None
    except BadHeader as error:
        raise _unusable(file, f"is damaged: it {error}") from None
    if strange := sorted({tensor.dtype for tensor in tensors.values()} & NOT_OF_MLX):
        raise _unusable(file, f"contains the type {strange[0]}, which MLX cannot read")
    return sum((t.end - t.begin) * _growth(t.dtype, upcast) for t in tensors.values())


def _growth(dtype: str, upcast: bool) -> int:
    """The factor by which a loaded tensor is larger than in its file."""
    unpacked = 2 if dtype.startswith("F8_") else 1  # most models unpack it to bfloat16
    return unpacked * (2 if upcast and (unpacked == 2 or dtype in ("F16", "BF16")) else 1)


def _unusable(file: Path, what: str) -> ModelUnusable:
    return ModelUnusable(
        f"{file.name} in the model's folder {file.parent.name!r} {what}. "
        "Download the model again, or convert it with `mlx_lm.convert`."
    )


def kv_bytes_per_token(config: dict[str, Any], bytes_per_value: int) -> KvCost:
    """The cost by config.json, with the size of the model's activations in bytes per value."""
    flat = _flat(config)
    _check_counts(flat)
    kinds = Counter(_kinds(flat))
    caches = _caches(flat)
    window = _number(flat, *WINDOW)
    full = kinds["full"] + kinds["both"] + (0 if window else kinds["sliding"])
    sliding = kinds["sliding"] if window else 0
    states = kinds["state"] + kinds["both"]
    return KvCost(
        per_token=caches * full * _attention_values(flat) * bytes_per_value,
        windowed_per_token=caches * sliding * _attention_values(flat) * bytes_per_value,
        window=window if sliding else 0,
        fixed=states * _state_bytes(flat, bytes_per_value),
    )


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's settings; nested ones have a dotted path as their key."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    model_type = str(text.get("model_type") or config.get("model_type"))
    flat = {**config, **DEFAULTS.get(model_type, {}), **text, "model_type": model_type}
    for outer, nested in tuple(flat.items()):
        if isinstance(nested, dict):
            flat |= {f"{outer}.{name}": value for name, value in nested.items()}
    return flat


def _check_counts(config: Mapping[str, Any]) -> None:
    """Raise ModelUnusable for counts that would make mlx-lm create far too many layers."""
    for name in filter(COUNT.search, config):
        if (count := _number(config, name)) > limits.CHECKPOINT_LAYERS.value:
            raise ModelUnusable(
                f"config.json: {name[-60:]} is {str(count)[:20]}; the limit is "
                f"{limits.CHECKPOINT_LAYERS.value}. Download the model again."
            )


def _number(config: Mapping[str, Any], *names: str) -> int:
    """The first setting that exists, or 0; the largest value if each layer has its own."""
    for name in names:
        found = config.get(name)
        numbers = [n for n in (found if isinstance(found, list) else [found]) if type(n) is int]
        if numbers and max(numbers) > 0:
            return max(numbers)
    return 0


def _caches(config: Mapping[str, Any]) -> int:
    """Number of caches per layer."""
    losses = config.get("loop_loss_weights")
    loops = len(losses) + 1 if isinstance(losses, list) else _number(config, "num_loops")
    return max(loops, CACHES.get(config["model_type"], 1))


def _kinds(config: Mapping[str, Any]) -> list[Kind]:
    """The kind of each layer that has a cache of its own."""
    types = _layer_types(config)
    count = _number(config, *LAYERS) or len(types) or UNKNOWN_LAYERS
    kept = count - _number(config, "num_kv_shared_layers")
    return [_kind(config, i, count, types) for i in range(kept if kept > 0 else count)]


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    for name in (*LAYER_TYPES, "sliding_window_pattern"):
        if (found := config.get(name)) and isinstance(found, list | str):
            return [str(layer) for layer in found]
    return []


def _kind(config: Mapping[str, Any], i: int, count: int, types: list[str]) -> Kind:
    model_type = config["model_type"]
    pattern = _number(config, "sliding_window_pattern") if model_type in PATTERNS else 0
    if types and not pattern:
        kind = KINDS.get(types[i % len(types)], "full")
        return "full" if kind == "sliding" and model_type not in SLIDING else kind
    if pattern := pattern or PATTERNS.get(model_type, 0):
        return "full" if (i + 1) % pattern == 0 else "sliding"
    linear = _number(config, "linear_value_head_dim") > 0
    if group := _number(config, "full_attention_interval", "layer_group_size") or linear * 4:
        return "full" if (i + 1) % group == 0 or i >= count // group * group else "state"
    if period := _number(config, "attn_layer_period"):
        return "full" if i % period == _number(config, "attn_layer_offset") else "state"
    if isinstance(recurrent := config.get("linear_attn_config.kda_layers"), list):
        return "state" if i + 1 in recurrent else "full"
    if isinstance(full := config.get("full_attn_idxs"), list):
        return "full" if i in full else "state"
    return EVERY_LAYER.get(model_type, "full")


def _attention_values(config: Mapping[str, Any]) -> int:
    """Number of values, keys included, that one layer caches per token."""
    heads, hidden = _number(config, *HEADS), _number(config, *HIDDEN)
    latent, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim") or 64
    index = 2 * _number(config, *INDEX)
    if latent and config["model_type"] in EXPANDED:
        nope, value = _number(config, "qk_nope_head_dim"), _number(config, "v_head_dim")
        return (heads or 128) * (rope + (nope or 128) + (value or 128))
    if latent:
        return latent + rope + index
    head = _number(config, *HEAD_DIM) or -(-hidden // (heads or 1)) or UNKNOWN_HEAD
    kv_heads = _number(config, *KV_HEADS) or heads or -(-hidden // head) or 1
    head = max(head, _number(config, "v_head_dim"), _number(config, "global_head_dim"))
    return 2 * head * max(kv_heads, _number(config, "num_global_key_value_heads")) + index


def _state_bytes(config: Mapping[str, Any], bytes_per_value: int) -> int:
    """Bytes of one recurrent layer: its state and the last inputs of its convolution."""
    for shape in STATES:
        if all(_number(config, n) for n in (*shape.channels, shape.per_channel or shape.kernel)):
            channels = math.prod(_number(config, name) for name in shape.channels)
            per_channel = _number(config, shape.per_channel)
            groups = (_number(config, shape.groups) or 1) if shape.groups else 0
            inputs = (_number(config, shape.kernel) or 4) * (channels + 2 * groups * per_channel)
            return channels * per_channel * STATE_BYTES + inputs * bytes_per_value
    return 0
