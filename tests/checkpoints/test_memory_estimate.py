"""Estimates made from files alone, held against what MLX really takes."""

import importlib
import json
import struct
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_server.checkpoints.memory_estimate import (
    SLIDING,
    STEP,
    KvCost,
    kv_bytes_per_token,
    weights_bytes,
)
from mlx_server.errors import ModelUnusable
from mlx_server.worker import weights

pytestmark = pytest.mark.tables

BASE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
MIXED = ["sliding_attention", "full_attention"] * 2
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": None,
    "rope_scaling": None,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with windows": {"layer_types": MIXED, "sliding_window": 24},
    "qwen3": {},
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window": 24, "sliding_window_pattern": 3},
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 7,
            "sliding_window": 24,
        }
    },
    "gpt_oss": {
        "layer_types": MIXED,
        "sliding_window": 24,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    "cohere2": {"sliding_window": 24, "head_dim": 8},
    "deepseek_v3": MLA,
    "deepseek_v2": {**MLA, "rope_scaling": {"type": "yarn", "factor": 1.0}},
    "mamba2": {
        "num_heads": 4,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, 1.0),
        "time_step_rank": "auto",
    },
    "mamba": {
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 2,
    },
    "jamba": {
        "head_dim": 8,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
    "kimi_linear": {
        **MLA,
        "num_experts": 2,
        "moe_intermediate_size": 32,
        "model_max_length": 4096,
        "linear_attn_config": {"num_heads": 4, "head_dim": 32, "kda_layers": [1, 2]},
    },
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "head_dim": 8,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 32,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
        "head_dim": 8,
    },
    "rwkv7": {
        "num_attention_heads": 2,
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
}


def config_of(kind: str) -> dict[str, Any]:
    return {**BASE, **SMALL[kind], "model_type": kind.split()[0]}


def cached_bytes(model: Any, tokens: int) -> int:
    """After a prefill in chunks and the decoding of some tokens one by one."""
    cache = make_prompt_cache(model)
    steps = min(tokens, 3)
    prompt = tokens - steps
    for step in [min(128, prompt - done) for done in range(0, prompt, 128)] + [1] * steps:
        mx.eval(model(mx.zeros((1, step), mx.int32), cache=cache))
    return sum(layer.nbytes for layer in cache)


@pytest.mark.parametrize("kind", SMALL)
def test_kv_estimates_are_never_below_and_at_most_twice_the_truth(kind: str) -> None:
    config = config_of(kind)
    cost = kv_bytes_per_token(config, bytes_per_value=4)
    arch = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = arch.Model(arch.ModelArgs.from_dict(json.loads(json.dumps(config))))
    model.set_dtype(mx.float32)
    for tokens in (1, 256, 300, 515):
        real = cached_bytes(model, tokens)
        assert real <= cost.for_tokens(tokens)
        assert tokens < 256 or cost.for_tokens(tokens) <= 2.05 * real


@pytest.mark.parametrize("model_type", sorted(SLIDING))
def test_mlx_lm_still_drops_what_slides_out_of_the_window(model_type: str) -> None:
    module = {"gemma3n_text": "gemma3n", "mistral": "llama"}.get(model_type, model_type)
    arch = importlib.import_module(f"mlx_lm.models.{module}")
    assert "RotatingKVCache" in vars(arch)


def test_sliding_layers_of_other_families_count_in_full() -> None:
    config = {**BASE, "layer_types": MIXED, "sliding_window": 24, "model_type": "qwen2"}
    per_token = 4 * 2 * 2 * 16 * 2
    assert kv_bytes_per_token(config, 2) == KvCost(per_token)
    half = KvCost(per_token // 2, per_token // 2, window=24)
    assert kv_bytes_per_token({**config, "model_type": "mistral"}, 2) == half
    assert half.for_tokens(1000) == (1000 + STEP - 1) * half.per_token + 24 * half.per_token


def test_what_the_config_leaves_out_is_counted_at_its_largest() -> None:
    bare = {"model_type": "new", "hidden_size": 64, "num_hidden_layers": 3}
    assert kv_bytes_per_token(bare, 2) == KvCost(3 * 2 * 64 * 2)
    heads = {**bare, "num_attention_heads": 8, "num_key_value_heads": None}
    assert kv_bytes_per_token(heads, 2) == KvCost(3 * 2 * 64 * 2)
    grouped = {**heads, "num_key_value_heads": [1, 2, 1]}
    assert kv_bytes_per_token(grouped, 2) == KvCost(3 * 2 * 2 * 8 * 2)
    headless = {**bare, "head_dim": 16}
    assert kv_bytes_per_token(headless, 2) == KvCost(3 * 2 * 64 * 2)
    expanded = {**bare, "model_type": "youtu_llm", "kv_lora_rank": 8}
    assert kv_bytes_per_token(expanded, 2) == KvCost(3 * 128 * (64 + 128 + 128) * 2)
    indexed = {**bare, "model_type": "deepseek_v32", "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    assert kv_bytes_per_token(indexed, 2) == KvCost(3 * (8 + 4 + 2 * 128) * 2)
    nested = {"model_type": "seeing", "text_config": grouped, "vision_config": {"hidden_size": 9}}
    assert kv_bytes_per_token(nested, 2) == kv_bytes_per_token(grouped, 2)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": 0, "hidden_size": 64},
        {"num_hidden_layers": "4", "hidden_size": 64},
    ],
)
def test_a_config_that_says_nothing_is_taken_for_a_large_one(config: dict[str, Any]) -> None:
    told = kv_bytes_per_token({"num_hidden_layers": 4, "hidden_size": 64}, 2)
    assert kv_bytes_per_token(config, 2).per_token > 10 * told.per_token


def loaded_bytes(folder: Path) -> int:
    loading = weights.load(folder)
    while True:
        try:
            next(loading)
        except StopIteration as end:
            return sum(array.nbytes for _, array in tree_flatten(end.value.parameters()))


def copied(source: Path, folder: Path, arrays: dict[str, mx.array], **config: Any) -> Path:
    folder.mkdir()
    config = {**json.loads((source / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def arrays_of(folder: Path) -> dict[str, mx.array]:
    arrays = mx.load(str(folder / "model.safetensors"))
    assert isinstance(arrays, dict)
    return arrays


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_weights_are_what_the_engine_loads(tiny_path: Path, tmp_path: Path, dtype: Any) -> None:
    arrays = {name: array.astype(dtype) for name, array in arrays_of(tiny_path).items()}
    folder = copied(tiny_path, tmp_path / "model", arrays)
    upcast = not mx.metal.is_available()
    assert weights_bytes(folder, upcast) == loaded_bytes(folder)
    assert weights_bytes(folder, upcast=False) == sum(array.nbytes for array in arrays.values())


def test_packed_weights_stay_packed(tiny_path: Path, tiny_model: Any, tmp_path: Path) -> None:
    how = {"group_size": 32, "bits": 4}
    model = type(tiny_model)(tiny_model.args)
    model.update(tiny_model.parameters())
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, **how)
    arrays = dict(tree_flatten(model.parameters()))
    folder = copied(tiny_path, tmp_path / "model", arrays, quantization=how)
    assert weights_bytes(folder, not mx.metal.is_available()) == loaded_bytes(folder)


def test_shards_add_up_and_none_may_be_missing(tiny_path: Path, tmp_path: Path) -> None:
    arrays = arrays_of(tiny_path)
    shards = {f"model-{i}-of-2.safetensors": list(arrays)[i::2] for i in range(2)}
    for shard, names in shards.items():
        mx.save_safetensors(str(tmp_path / shard), {name: arrays[name] for name in names})
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_bytes(tmp_path, upcast=True) == weights_bytes(tiny_path, upcast=True)
    (tmp_path / "model-1-of-2.safetensors").unlink()
    with pytest.raises(ModelUnusable, match=r"^model-1-of-2\.safetensors .* is missing"):
        weights_bytes(tmp_path, upcast=True)


def test_a_folder_without_weights_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "adapters.safetensors").write_bytes(b"")
    with pytest.raises(ModelUnusable, match=r"^model\.safetensors .* is missing.*Download"):
        weights_bytes(tmp_path, upcast=True)


def test_a_damaged_index_is_unusable(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"weight_map": {"a": 1}}', "[" * 100_000):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelUnusable, match=r"^model\.safetensors\.index\.json .* is damaged"):
            weights_bytes(tmp_path, upcast=True)


def file_of(header: object, data: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def tensor(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


DAMAGED = {
    "empty": b"",
    "too short for a length": b"\1\0",
    "longer than the file": struct.pack("<Q", 1 << 63) + b"{}",
    "cut in the header": file_of(tensor())[:40],
    "cut in the data": file_of(tensor(), data=7),
    "too much data": file_of(tensor(), data=9),
    "no JSON": file_of(b"{'a'}"),
    "no UTF-8": file_of(b'{"\xff": 1}'),
    "a list": file_of([]),
    "deeply nested": file_of(b"[" * 100_000),
    "no entry": file_of({"a": 1}),
    "nothing in the entry": file_of({"a": {}}),
    "an unknown type": file_of(tensor(dtype="F99")),
    "another shape": file_of(tensor(shape=(3,))),
    "a negative shape": file_of(tensor(shape=(-1, -2))),
    "a shape of fractions": file_of(tensor(shape=(2.0,))),
    "negative offsets": file_of(tensor(offsets=(-8, 0))),
    "offsets that are no numbers": file_of(tensor(offsets=(False, 8))),
    "one offset": file_of(tensor(offsets=(8,))),
    "an enormous shape": file_of(tensor(shape=(1 << 62, 1 << 62))),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_weights_are_unusable(damage: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[damage])
    with pytest.raises(ModelUnusable, match=r"^model\.safetensors .* is damaged.*Download"):
        weights_bytes(tmp_path, upcast=True)


def test_a_header_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)
    with pytest.raises(ModelUnusable, match="is damaged"):
        weights_bytes(tmp_path, upcast=True)


def test_weights_that_cannot_be_read_are_unusable(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelUnusable, match=r"^model\.safetensors .* cannot be read"):
        weights_bytes(tmp_path, upcast=True)


def test_a_file_may_be_without_tensors_and_have_metadata(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(file_of({"__metadata__": {"format": "mlx"}}, 0))
    assert weights_bytes(tmp_path, upcast=True) == 0


@pytest.mark.parametrize(
    ("dtype", "size", "as_is", "upcast"),
    [("BF16", 2, 8, 16), ("F32", 4, 16, 16), ("U32", 4, 16, 16), ("F8_E4M3", 1, 8, 16)],
)
def test_halves_grow_on_machines_without_metal(
    tmp_path: Path, dtype: str, size: int, as_is: int, upcast: int
) -> None:
    header = tensor(dtype, shape=(4,), offsets=(0, 4 * size))
    (tmp_path / "model.safetensors").write_bytes(file_of(header, data=4 * size))
    assert weights_bytes(tmp_path, upcast=False) == as_is
    assert weights_bytes(tmp_path, upcast=True) == upcast


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F16", "U8", "X"]) | JSON,
        "shape": st.lists(st.integers(-1, 4)) | JSON,
        "data_offsets": st.lists(st.integers(-1, 16), min_size=2, max_size=2) | JSON,
    },
)


@given(st.binary() | st.dictionaries(st.text(), ENTRIES | JSON).map(file_of))
def test_any_file_gives_a_number_or_is_unusable(content: bytes) -> None:
    with TemporaryDirectory() as folder, suppress(ModelUnusable):
        (Path(folder) / "model.safetensors").write_bytes(content)
        assert weights_bytes(Path(folder), upcast=True) >= 0


def names_and_values() -> st.SearchStrategy[dict[str, Any]]:
    names = ("num_hidden_layers", "hidden_size", "model_type", "layer_types", "sliding_window")
    more = ("text_config", "linear_attn_config", "full_attn_idxs", "loop_loss_weights")
    small = st.integers(-1, 64)
    values = small | st.lists(st.sampled_from(["mamba", "sliding_attention", ""])) | JSON
    flat = st.dictionaries(st.sampled_from(names + more), values)
    return flat | st.fixed_dictionaries({"text_config": flat}) | st.dictionaries(st.text(), JSON)


@given(names_and_values())
def test_any_config_gives_a_cost_or_is_unusable(config: dict[str, Any]) -> None:
    with suppress(ModelUnusable):
        cost = kv_bytes_per_token(config, 2)
        assert 0 <= cost.for_tokens(1) <= cost.for_tokens(2)
