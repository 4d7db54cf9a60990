"""Tiny random checkpoints with each kind of cache, a template that drops earlier thoughts, and the
demo model's tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from mlx_server.sources.demo import demo_checkpoint

Json = dict[str, Any]

COMMON: Json = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 65_536,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

WINDOW = 64

MODELS: dict[str, Json] = {
    "llama": {"model_type": "llama"},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_scaling": None,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 32,
    },
    "lfm2": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "full_attn_idxs": [1, 3],
        "block_dim": 64,
        "block_ff_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            **COMMON,
            "model_type": "qwen3_5_text",
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 2,
            "partial_rotary_factor": 0.5,
        },
    },
}

TEMPLATE = """\
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
{%- if message.role == "user" %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content and loop.index0 > last.question %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


def save(name: str, folder: Path, padding: int = 1) -> Path:
    """Writes a checkpoint. padding: the number of the model's ids divided by that of its
    tokenizer."""
    demo = demo_checkpoint(lambda *progress: None)
    path = folder / name
    shutil.copytree(demo, path, ignore=shutil.ignore_patterns("*.safetensors"))
    vocabulary = padding * json.loads((demo / "config.json").read_text())["vocab_size"]
    config = {**COMMON, **MODELS[name], "vocab_size": vocabulary}
    if text := config.get("text_config"):
        config["text_config"] = {**text, "vocab_size": vocabulary}
    model_class, args_class = _get_classes(config)
    mx.random.seed(7)
    weights = dict(tree_flatten(model_class(args_class.from_dict(config)).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(
        json.dumps({**tokenizer, "chat_template": TEMPLATE})
    )
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path
