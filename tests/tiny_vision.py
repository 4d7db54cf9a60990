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

FURTHER = (
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<|image>",
    "<|image|>",
    "<image|>",
    "<image>",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<|media_start|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
    "<fake_token_around_image>",
    "<global-img>",
    "<row_1_col_1>",
    "<row_1_col_2>",
    "<row_2_col_1>",
    "<row_2_col_2>",
    "<|IMG_PATCH|>",
    "<|START_OF_IMG|>",
    "<|END_OF_IMG|>",
    "<im_patch>",
    "<im_col>",
    "<im_start>",
    "<im_end>",
    "<low_res_im_start>",
    "<|IMAGE_PLACEHOLDER|>",
    "<｜hy_place_holder▁no▁102｜>",
    *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in range(1, 6)),
)
"""The tokens of all families, so that one tokenizer does for them."""

MROPE = {"type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True}

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
    tower: Mapping[str, Any]
    config: Mapping[str, Any]
    image: Mapping[str, Any]
    """preprocessor_config.json"""
    processor: Mapping[str, Any] = field(default_factory=dict)
    """processor_config.json"""


FLAT = ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl")
"""Whose checkpoints have the text model's settings among the others."""


def _qwen(kind: str, text: Mapping[str, Any], tower: Mapping[str, Any]) -> TinyVision:
    return TinyVision(
        {"model_type": kind if kind in FLAT else f"{kind}_text", **text},
        {
            "depth": 3,
            "num_heads": 2,
            "out_hidden_size": 64,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
            **tower,
        },
        {
            "image_token_id": id_of("<|image_pad|>"),
            "video_token_id": VOCABULARY - 1,
            "vision_start_token_id": id_of("<|vision_start|>"),
            "vision_end_token_id": id_of("<|vision_end|>"),
        },
        {"size": {"shortest_edge": 1024, "longest_edge": 65536}},
    )


LINEAR = {
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": {
        **MROPE,
        "mrope_section": [2, 1, 1],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

GLM_TOWER = {
    "depth": 3,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "image_size": 84,
    "in_channels": 3,
    "rms_norm_eps": 1e-5,
}
GLM = {
    "image_token_id": id_of("<|image|>"),
    "video_token_id": VOCABULARY - 1,
    "vision_start_token_id": id_of("<|vision_start|>"),
}
GLM_IMAGE = {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 131072}}

INTERN = {"image_size": 64, "layer_norm_eps": 1e-6}

PIXTRAL = {
    "model_type": "pixtral",
    "patch_size": 14,
    "head_dim": 16,
    "image_size": 112,
    "rope_theta": 10000.0,
}
PIXTRAL_IMAGE = {"patch_size": 14, "size": {"longest_edge": 112}}
PIXTRAL_PROCESSOR = {"patch_size": 14, "image_token": "[IMG]"}

PALIGEMMA = TinyVision(
    {
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 16,
    },
    {"model_type": "siglip_vision_model", "image_size": 64, "projection_dim": 64},
    {"image_token_index": id_of("<image>"), "hidden_size": 64},
    {"size": {"height": 64, "width": 64}, "resample": 3},
)

VISION_FAMILIES: dict[str, TinyVision] = {
    "qwen2_5_vl": _qwen(
        "qwen2_5_vl",
        {"rope_scaling": {"type": "mrope", "mrope_section": [3, 3, 2]}},
        {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56, "in_channels": 3},
    ),
    "qwen2_vl": _qwen(
        "qwen2_vl",
        {"rope_scaling": {"type": "mrope", "mrope_section": [3, 3, 2]}},
        {"patch_size": 14, "embed_dim": 32, "hidden_size": 64, "in_channels": 3, "mlp_ratio": 2},
    ),
    "qwen3_vl": _qwen("qwen3_vl", {"rope_scaling": MROPE}, {"deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": _qwen(
        "qwen3_vl_moe", {"rope_scaling": MROPE, **EXPERTS}, {"deepstack_visual_indexes": [0]}
    ),
    "qwen3_5": _qwen("qwen3_5", LINEAR, {}),
    "glm4v": TinyVision(
        {
            "model_type": "glm4v_text",
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
        GLM_TOWER,
        GLM,
        GLM_IMAGE,
    ),
    "internvl": TinyVision(
        {"model_type": "qwen3"},
        {**INTERN, "model_type": "internvl_vision", "image_size": [64, 64], "patch_size": [16, 16]},
        {"image_token_id": id_of("<IMG_CONTEXT>"), "downsample_ratio": 0.5},
        {"max_patches": 4, "size": {"height": 64, "width": 64}},
    ),
    "internvl_chat": TinyVision(
        {"model_type": "qwen2"},
        {**INTERN, "model_type": "intern_vit_6b"},
        {
            "downsample_ratio": 0.5,
            "force_image_size": 64,
            "max_dynamic_patch": 4,
            "image_token_index": id_of("<IMG_CONTEXT>"),
        },
        {"size": 64},
    ),
    "internvl_2": TinyVision(
        {"model_type": "internlm2", "bias": False, "rope_scaling": None},
        {**INTERN, "model_type": "intern_vit_6b"},
        {
            "model_type": "internvl_chat",
            "downsample_ratio": 0.5,
            "force_image_size": 64,
            "max_dynamic_patch": 4,
            "image_token_index": id_of("<IMG_CONTEXT>"),
            "use_thumbnail": False,
        },
        {"size": 64},
    ),
    "llava": TinyVision(
        {"model_type": "llama"},
        {"model_type": "clip_vision_model", "image_size": 48},
        {"image_token_index": id_of("<image>"), "vision_feature_select_strategy": "default"},
        {"size": {"shortest_edge": 48}, "crop_size": {"height": 48, "width": 48}},
    ),
    "kimi_vl": TinyVision(
        {
            "model_type": "deepseek_v3",
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        {
            "model_type": "moonvit",
            "depth": 3,
            "embed_dim": 32,
            "num_heads": 2,
            "patch_size": 14,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
        },
        {"media_placeholder_token_id": id_of("<|media_pad|>")},
        {"patch_size": 14, "in_token_limit": 64, "merge_kernel_size": [2, 2], "pad_input": True},
    ),
    "glm4v_moe": TinyVision(
        {
            "model_type": "glm4v_moe_text",
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
        },
        GLM_TOWER,
        GLM,
        GLM_IMAGE,
    ),
    "paligemma": PALIGEMMA,
    "paligemma_1": replace(
        PALIGEMMA,
        text={"model_type": "gemma", "hidden_activation": "gelu"},
        config={**PALIGEMMA.config, "model_type": "paligemma"},
    ),
    "gemma3": TinyVision(
        {
            "model_type": "gemma3_text",
            "sliding_window": 12,
            "sliding_window_pattern": 2,
            "mm_tokens_per_image": 16,
            "query_pre_attn_scalar": 16,
        },
        {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 56},
        {
            "image_token_index": id_of("<image_soft_token>"),
            "boi_token_index": id_of("<start_of_image>"),
            "eoi_token_index": id_of("<end_of_image>"),
            "hidden_size": 64,
            "mm_tokens_per_image": 16,
        },
        {"size": {"height": 56, "width": 56}, "resample": 2},
    ),
    "gemma3n": TinyVision(
        {
            "model_type": "gemma3n_text",
            "vocab_size": id_of("<end_of_image>") + 1,
            "vocab_size_per_layer_input": id_of("<image_soft_token>"),
            "num_kv_shared_layers": 0,  # mlx-vlm gives such layers other positions
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "intermediate_size": [128] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "sliding_window": 12,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        },
        {
            "model_type": "gemma3n_vision",
            "hidden_size": 64,
            "vocab_offset": id_of("<image_soft_token>"),
            "vocab_size": 2,
        },
        {
            "image_token_id": id_of("<image_soft_token>"),
            "audio_config": {"vocab_offset": id_of("<end_of_image>") + 1},
            "vision_soft_tokens_per_image": 256,
        },
        {"size": {"height": 512, "width": 512}, "resample": 2, "do_normalize": False},
    ),
    "gemma4": TinyVision(
        {
            "model_type": "gemma4_text",
            "num_hidden_layers": 6,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
            "tie_word_embeddings": True,
        },
        {
            "model_type": "gemma4_vision",
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 16,
            "patch_size": 16,
            "position_embedding_size": 64,
            "pooling_kernel_size": 3,
            "default_output_length": 16,
        },
        {
            "image_token_id": id_of("<|image|>"),
            "audio_token_id": VOCABULARY - 1,
            "audio_config": {"model_type": "gemma4_audio"},
        },
        {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 16, "do_normalize": False},
    ),
    "hunyuan_vl": TinyVision(
        {
            "model_type": "hunyuan_vl",
            "tie_word_embeddings": True,
            "rope_theta": 10.0,  # a picture's number turns the slowest pairs
            "rope_scaling": {
                "type": "xdrope",
                "alpha": 2.0,
                "factor": 1.0,
                "xdrope_section": [2] * 4,
            },
        },
        {"out_hidden_size": 64, "max_image_size": 128},
        {
            "image_token_id": id_of("<｜hy_place_holder▁no▁102｜>"),
            "tie_word_embeddings": True,
        },
        {"min_pixels": 4096, "max_pixels": 65536, "resample": 2},
    ),
    "lfm2_vl": TinyVision(
        {
            "model_type": "lfm2",
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "conv_dim": 64,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [1, 3],
            "layer_types": ["conv", "full_attention"] * 2,
            "num_heads": 4,
            "tie_word_embeddings": True,
        },
        {"model_type": "siglip2_vision_model", "num_patches": 16},
        {"image_token_id": id_of("<image>"), "downsample_factor": 2, "projector_hidden_size": 64},
        {
            "min_image_tokens": 2,
            "max_image_tokens": 4,
            "encoder_patch_size": 16,
            "downsample_factor": 2,
            "tile_size": 64,
        },
    ),
    "smolvlm": TinyVision(
        {"model_type": "llama"},
        {"model_type": "smolvlm_vision", "image_size": 64},
        {"image_token_id": id_of("<image>"), "scale_factor": 2},
        {
            "max_image_size": {"longest_edge": 64},
            "size": {"longest_edge": 128},
            "resample": 1,
        },
    ),
    "pixtral": TinyVision(
        {"model_type": "mistral"},
        PIXTRAL,
        {
            "image_token_index": id_of("[IMG]"),
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        PIXTRAL_IMAGE,
        PIXTRAL_PROCESSOR,
    ),
    "mistral3": TinyVision(
        {"model_type": "mistral"},
        PIXTRAL,
        {
            "image_token_index": id_of("[IMG]"),
            "vision_feature_layer": -1,
            "spatial_merge_size": 2,
            "multimodal_projector_bias": False,
        },
        PIXTRAL_IMAGE,
        {**PIXTRAL_PROCESSOR, "spatial_merge_size": 2},
    ),
}


BORROWING = {
    "kimi_k25": replace(
        VISION_FAMILIES["kimi_vl"],
        tower={**VISION_FAMILIES["kimi_vl"].tower, "hidden_size": 32},
        image={"media_proc_cfg": {"patch_size": 14, "in_patch_limit": 64}},
    ),
}
"""Those for whose pictures there is no recipe, though mlx-lm has their text models."""
VISION_FAMILIES |= BORROWING

LLAVA = VISION_FAMILIES["llava"]
VISION_FAMILIES["llava_padded"] = replace(
    LLAVA,
    config={**LLAVA.config, "model_type": "llava"},
    image={**LLAVA.image, "do_pad": True, "image_mean": [0.1, 0.5, 0.9]},
)
IDEFICS3 = {**VISION_FAMILIES["smolvlm"].tower, "model_type": "idefics3_vision"}
VISION_FAMILIES["idefics3"] = replace(VISION_FAMILIES["smolvlm"], tower=IDEFICS3)


SQUARE = {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
PINPOINTS = {"image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112]]}
MOLMO = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32}

WHOLE_FAMILIES: dict[str, TinyVision] = {
    "molmo2": TinyVision(
        {"model_type": "molmo2", "additional_vocab_size": 8, "head_dim": 32},
        {},
        {
            "image_patch_id": id_of("<im_patch>"),
            "image_end_token_id": id_of("<im_end>"),
            "vit_config": {
                **MOLMO,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "image_num_pos": 16,
                "image_default_input_size": [56, 56],
            },
            "adapter_config": {
                **MOLMO,
                "intermediate_size": 64,
                "text_hidden_size": 64,
                "vit_layers": [-1, -2],
            },
        },
        {
            "size": {"height": 56, "width": 56},
            "max_crops": 4,
            "overlap_margins": [1, 1],
            "patch_size": 14,
            "pooling_size": [2, 2],
        },
    ),
    "molmo": TinyVision(
        {
            "model_type": "molmo",
            "d_model": 64,
            "n_heads": 4,
            "n_kv_heads": 2,
            "n_layers": 3,
            "mlp_hidden_size": 128,
            "embedding_size": VOCABULARY,
            "additional_vocab_size": 8,
        },
        {
            "image_default_input_size": [84, 84],
            "image_num_pos": 37,
            "image_emb_dim": 32,
            "image_num_heads": 2,
            "image_num_key_value_heads": 2,
            "image_num_layers": 3,
            "image_head_dim": 16,
            "image_mlp_dim": 64,
            "d_model": 64,
            "hidden_size": 64,
            "vit_layers": [-1, -2],
            "intermediate_size": 588,
        },
        {"image_patch_id": id_of("<im_patch>")},
        {
            "base_image_input_size": [84, 84],
            "image_token_length_w": 3,
            "image_token_length_h": 3,
            "image_patch_size": 14,
            "max_crops": 4,
            "overlap_margins": [2, 2],
        },
    ),
    "aya_vision": TinyVision(
        {"model_type": "cohere2", "layer_norm_eps": 1e-5, "sliding_window": 12},
        SQUARE,
        {
            "image_token_index": id_of("<|IMG_PATCH|>"),
            "alignment_intermediate_size": 64,
        },
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 56, "width": 56},
            "crop_to_patches": True,
            "max_patches": 4,
        },
        {"patch_size": 14, "img_size": 56, "downsample_factor": 2},
    ),
    "llava_onevision": TinyVision(
        {"model_type": "qwen2"},
        SQUARE,
        {
            **PINPOINTS,
            "image_token_index": id_of("<image>"),
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
        },
        {
            **PINPOINTS,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 56, "width": 56},
        },
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "glm_ocr": TinyVision(
        {
            "model_type": "glm_ocr_text",
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [3, 3, 2],
                "partial_rotary_factor": 1.0,
                "rope_theta": 10000,
            },
        },
        {
            **GLM_TOWER,
            "model_type": "glm_ocr_vision",
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_channels": None,
        },
        {
            "image_token_id": id_of("<|image|>"),
            "video_token_id": VOCABULARY - 1,
            "image_start_token_id": id_of("<|vision_start|>"),
        },
        GLM_IMAGE,
    ),
    "paddleocr_vl": TinyVision(
        {
            "hidden_size": 1024,  # as mlx-vlm's code has it
            "num_hidden_layers": 2,
            "use_bias": False,
            "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
        },
        {"patch_size": 14, "image_size": 56, "spatial_merge_size": 2},
        {
            "image_token_id": id_of("<|IMAGE_PLACEHOLDER|>"),
            "video_token_id": VOCABULARY - 1,
            "vision_start_token_id": id_of("<|vision_start|>"),
        },
        {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 50176},
    ),
}
"""Those that mlx-vlm computes as a whole."""


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
