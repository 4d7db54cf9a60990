"""A tiny random checkpoint of every architecture of mlx-lm that has a family here.

Sizes are the smallest at which every part of an architecture is at work: several experts, layers of
each type, prompts on both sides of windows and chunks.
"""

from typing import Any

from tests.worker.kinds import BLOCKS, CONVOLUTIONS, GPT_OSS, LLAMA, MAMBA2, SIZES, Kind

WINDOW = 32

SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "rope_scaling": None,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}
INDEXED = {**ROUTED, **LATENT, "index_head_dim": 32, "index_n_heads": 4, "index_topk": 16}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 64,
    "partial_rotary_factor": 0.5,
}
GRANITE = {
    "logits_scaling": 8.0,
    "attention_multiplier": 0.1,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.2,
    "attention_bias": False,
    "mlp_bias": False,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_proj_bias": False,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
}
DELTA_ATTENTION = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}


def text(model_type: str, outer: str, **config: Any) -> dict[str, Any]:
    """As checkpoints nest it that can also see."""
    return {"model_type": outer, "text_config": {**SIZES, "model_type": model_type, **config}}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-sliding": {**LLAMA, **SLIDING},
    "gpt_oss": GPT_OSS,
    "qwen2": {"model_type": "qwen2"},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **EXPERTS,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS},
    "qwen3_next": {"model_type": "qwen3_next", **EXPERTS, **LINEAR},
    "qwen3_5": text("qwen3_5_text", "qwen3_5", **LINEAR),
    "qwen3_5_moe": text("qwen3_5_moe_text", "qwen3_5_moe", **EXPERTS, **LINEAR),
    "qwen3_5-text": {"model_type": "qwen3_5_text", **LINEAR},
    "qwen3_5_moe-text": {"model_type": "qwen3_5_moe_text", **EXPERTS, **LINEAR},
    "glm": {"model_type": "glm", "attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4": {"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4_moe": {
        "model_type": "glm4_moe",
        **ROUTED,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **ROUTED, **LATENT},
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        **INDEXED,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gemma": {"model_type": "gemma"},
    "gemma2": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 32.0,
    },
    "gemma3_text": {"model_type": "gemma3_text", "sliding_window": WINDOW}
    | {"sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
    "gemma3": {
        **text("gemma3_text", "gemma3", sliding_window=WINDOW, sliding_window_pattern=2),
        "vocab_size": 320,
    },
    "gemma4": {
        **text(
            "gemma4_text",
            "gemma4",
            **SLIDING,
            global_head_dim=32,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=320,
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
        ),
        "vocab_size": 320,
    },
    "gemma4_text": {
        "model_type": "gemma4_text",
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6,
        "global_head_dim": 64,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 320,
        "tie_word_embeddings": True,
    },
    "llama4": text(
        "llama4_text",
        "llama4",
        attention_bias=False,
        attention_chunk_size=WINDOW,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=128,
        num_experts_per_tok=1,
        num_local_experts=4,
        rope_scaling=None,
        use_qk_norm=True,
    ),
    "llama4_text": {
        "model_type": "llama4_text",
        "intermediate_size_mlp": 128,
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": True,
    },
    "ministral3": {
        "model_type": "ministral3",
        **SLIDING,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral3": text("llama", "mistral3"),
    "mistral4": {"model_type": "mistral4", **ROUTED, **LATENT}
    | {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        }
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", **ROUTED, **LATENT},
    "deepseek_v32": {"model_type": "deepseek_v32", **INDEXED},
    "kimi_linear": {
        "model_type": "kimi_linear",
        **LATENT,
        "linear_attn_config": DELTA_ATTENTION,
        "model_max_length": 4096,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "mla_use_nope": True,
    },
    "kimi_k25": text("kimi_k2", "kimi_k25", **ROUTED, **LATENT),
    "minimax": {
        "model_type": "minimax",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "rotary_dim": 16,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "-", "E"],
        **{key: ROUTED[key] for key in ("n_routed_experts", "n_shared_experts", "n_group")},
        "num_experts_per_tok": 2,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
    "lfm2": {
        "model_type": "lfm2",
        **CONVOLUTIONS,
        **BLOCKS,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        **CONVOLUTIONS,
        **EXPERTS,
        "use_expert_bias": True,
        "num_dense_layers": 1,
    },
    "granite": {"model_type": "granite", **GRANITE},
    "granitemoe": {
        "model_type": "granitemoe",
        **GRANITE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        **GRANITE,
        **MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        **MAMBA,
        "mamba_d_ssm": 128,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
    },
    "olmo3": {"model_type": "olmo3", **SLIDING},
    "exaone4": {
        "model_type": "exaone4",
        "rope_scaling": None,
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LLLG",
    },
    "cohere2": {"model_type": "cohere2", "head_dim": 16, "sliding_window": WINDOW}
    | {"sliding_window_pattern": 2},
    "cohere": {"model_type": "cohere"},
    "phi3": {"model_type": "phi3"},
    "phi3small": {
        "model_type": "phi3small",
        "vocab_size": 100_352,  # it bans tokens up to there by their ids
        "hidden_size": 32,
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 128,
        "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2,
    },
    "phimoe": {
        "model_type": "phimoe",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
        },
    },
    "pixtral": text("llama", "pixtral"),
    "lfm2-vl": text("lfm2", "lfm2_vl", **CONVOLUTIONS, **BLOCKS),
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        **LINEAR,
        "linear_num_key_heads": 4,
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "gemma3n": text(
        "gemma3n_text",
        "gemma3n",
        **SLIDING,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=320,
        rope_local_base_freq=10000.0,
        final_logit_softcapping=30.0,
        activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0],
        hidden_size_per_layer_input=16,
        altup_num_inputs=4,
        altup_coef_clip=120.0,
        altup_correct_scale=True,
        altup_active_idx=0,
        laurel_rank=8,
    ),
    "kimi_k3": text(
        "kimi_linear",
        "kimi_k3",
        **LATENT,
        linear_attn_config=DELTA_ATTENTION,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        attn_res_block_size=2,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        routed_expert_hidden_size=32,
        latent_moe_use_norm=True,
        mla_use_output_gate=True,
    ),
    "seed_oss": {"model_type": "seed_oss"},
    "smollm3": {"model_type": "smollm3"},
    "mamba2": MAMBA2,
    "afm7": {
        "model_type": "afm7",
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "deepseek_v41": {
        "model_type": "deepseek_v41",
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "compress_ratios": [1, 4, 4, 1],
        "kv_source_layer_ids": [0, 1, 2, 3],
        "index_source_layer_ids": [0, 1, 2, 3],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
    },
}
"""By mlx-lm's module; what stands after a dash is a variant."""

ARCHITECTURES = tuple(Kind(name, config) for name, config in CONFIGS.items())
