"""Tiny checkpoints that see, of each family: random weights of mlx-lm's text model and of mlx-vlm's
tower, with settings of real checkpoints but for their sizes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from tests.tiny import (
    IM_END,
    TOKENS,
    random_weights,
    tiny_llama,
    tokenizer,
    tokenizer_config,
    write_json,
)

VOCABULARY = 320

DATA = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))

FURTHER = (
    *DATA["tokens"],
    *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in range(1, 6)),
)
"""The tokens of all families, so that one tokenizer does for them."""

VISION_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


def id_of(token: str) -> int:
    return TOKENS + FURTHER.index(token)


@dataclass(frozen=True)
class TinyVision:
    text: Mapping[str, Any]
    """The settings that its text model has of its own; so do the following."""
    config: Mapping[str, Any]
    image: Mapping[str, Any]
    """preprocessor_config.json"""
    tower: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    """processor_config.json"""


FLAT = ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "zaya1_vl")
"""Whose checkpoints have the text model's settings among the others."""


def _families(kind: str) -> dict[str, TinyVision]:
    """Those of tiny_vision.json. A token among the settings of a `config` is there for its id.

    Two sizes are what mlx-vlm's code lets them be: PaddleOCR-VL's width, and that no layers of
    Gemma 3n share keys, to which mlx-vlm gives other positions. HunYuan-VL's `rope_theta` is small:
    a picture's number turns the slowest pairs."""
    for parts in DATA[kind].values():
        ids = {key: id_of(value) for key, value in parts["config"].items() if value in FURTHER}
        parts["config"] |= ids
    return {name: TinyVision(**parts) for name, parts in DATA[kind].items()}


VISION_FAMILIES = _families("towers")
WHOLE_FAMILIES = _families("whole")
"""Those that mlx-vlm computes as a whole."""
LLAVA = VISION_FAMILIES["llava"]
BORROWING = ("kimi_k25",)
"""Those for whose pictures there is no recipe, though mlx-lm has their text models."""


def shrink(package: Any) -> None:
    """Leaves little of a tower whose layers mlx-vlm's code decides on: the first and the last
    blocks of each stage, and narrow ones."""
    names = package.VisionModel.__init__.__globals__
    if make := names.get("gemma3n_mobilenet_def"):
        adapter = "MobileNetV5MultiScaleFusionAdapter"
        own, stages = names[adapter], [[*stage[:1], *stage[-2:]] for stage in make()]
        narrow = [
            replace(block, filters=width, expand_ratio=1.0)
            if hasattr(block, "filters")
            else replace(block, num_heads=2, kv_dim=8)
            for width, stage in zip((16, 16, 32, 64), stages, strict=True)
            for block in stage
        ]
        names["gemma3n_mobilenet_def"] = lambda: [narrow[at : at + 3] for at in (0, 3, 6, 9)]
        names[adapter] = lambda in_chs, out_chs, output_resolution: own([96], 64, output_resolution)


def tiny_vision(folder: Path, family: str = "qwen3_vl", *, seed: int = 0) -> Path:
    """A checkpoint that sees. Needs the extra `vision`."""
    from mlx_server.models.vision import FAMILIES
    from mlx_server.worker.vision_towers import make_tower, package_of
    from mlx_server.worker.weights import model_classes

    own = VISION_FAMILIES.get(family) or WHOLE_FAMILIES[family]
    tiny_llama(folder)
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **own.text,
    }
    tower = {
        "model_type": family,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_channels": 3,
        "patch_size": 16,
        **own.tower,
    }
    if family == "glm_ocr":  # mlx-vlm's takes no others
        text, tower = ({k: v for k, v in of.items() if v is not None} for of in (text, tower))
    config = {
        "model_type": family,
        "vocab_size": VOCABULARY,
        "eos_token_id": IM_END,
        "tie_word_embeddings": False,
        **own.config,
        "text_config": text,
    }
    config |= {"vision_config": tower} if own.tower else {}
    if family in FLAT:
        config |= {**config.pop("text_config"), "model_type": family}
    means = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", {**means, **own.image})
    if own.processor:
        write_json(folder / "processor_config.json", own.processor)
    write_json(
        folder / "tokenizer_config.json", {**tokenizer_config(), "chat_template": VISION_TEMPLATE}
    )
    tokenizer(FURTHER).save(str(folder / "tokenizer.json"))
    model, arguments = model_classes(config)
    parts = [model(arguments.from_dict(json.loads(json.dumps(config))))]
    known = FAMILIES.get(kind := str(config["model_type"]))
    if package := known.package if known else kind if kind in BORROWING else "":
        shrink(package_of(package))
        parts.append(make_tower(config, package))
    shapes = {name: array.shape for part in parts for name, array in _parameters(part)}
    for name in [name for name in shapes if "unembed_out" in name]:  # mlx-lm's halves of a tensor
        (heads, values, rank), keys = shapes.pop(name), name.replace("unembed_out", "embed_q")
        both = heads * (values + shapes.pop(keys)[-1])
        shapes[name.replace("unembed_out", "kv_b_proj")] = (both, rank)
    weights = random_weights(shapes, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _parameters(part: nn.Module) -> list[tuple[str, mx.array]]:
    return list(tree_flatten(part.parameters()))
