"""What is read of mlx-lm's source without importing it, next to what mlx-lm itself does."""

from pathlib import Path
from typing import Any

import pytest

from mlx_server.models import checkpoint
from mlx_server.models.architectures import module_of, why_unknown

GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (GEMMA3, 131_072),
        ({}, 131_072),
        ({"model_type": 5, "text_config": [1]}, 131_072),
        ({"model_type": "llama", "max_position_embeddings": 512}, 512),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"model_type": "kimi_linear", "model_max_length": 1_048_576}, 1_048_576),
        ({"model_type": "dbrx", "max_seq_len": 32_768}, 32_768),
        ({"model_type": "x", "text_config": {"max_position_embeddings": 9000}}, 9000),
        ({"model_type": "x", "llm_config": {"max_position_embeddings": 9000}}, 9000),
        ({"max_position_embeddings": True, "n_positions": 2048}, 2048),
    ],
)
def test_the_context_of_a_model(config: dict[str, Any], context: int) -> None:
    assert checkpoint._context_length(config) == context


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 32_768}, 131_072),
        ({"type": "yarn", "factor": 0.5, "original_max_position_embeddings": 32_768}, 40_960),
        ({"type": "yarn", "factor": 1e30, "original_max_position_embeddings": 32_768}, 40_960),
        ({"type": "yarn", "factor": "4"}, 40_960),
        ({"type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}, 40_960),
        ({"type": "linear", "factor": 8.0}, 40_960),
        (["yarn"], 40_960),
        (None, 40_960),
    ],
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rope_that_was_stretched_by_hand(name: str, rope: Any, context: int) -> None:
    config = {"model_type": "qwen3", "max_position_embeddings": 40_960, name: rope}
    assert checkpoint._context_length(config) == context


@pytest.mark.parametrize(
    ("config", "module"),
    [
        ({"model_type": "mistral"}, "llama"),
        ({"model_type": "kimi_k2"}, "deepseek_v3"),
        ({"model_type": "minimax_m2"}, "minimax"),
        ({"model_type": "qwen3_5_text"}, "qwen3_5"),
        ({"model_type": "lfm2_vl"}, "lfm2-vl"),
        ({"model_type": "bailing_hybrid"}, "bailing_hybrid"),
        (
            {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]},
            "bailing_moe_v3",
        ),
        ({"model_type": "deepseek_v4"}, None),
        ({"model_type": "glm4v_moe"}, None),
        ({"model_type": "kimi_vl", "text_config": {"model_type": "deepseek_v3"}}, "deepseek_v3"),
        ({"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2"}}, "qwen2"),
        ({"model_type": "phi4mm"}, None),
        ({"model_type": "../utils"}, None),
        ({"model_type": "llama\0"}, None),
        ({"model_type": ["llama"]}, None),
        ({}, None),
    ],
)
def test_the_module_of_a_model(config: dict[str, Any], module: str | None) -> None:
    assert module_of(config) == module
    assert (why_unknown(config) is None) == (module is not None)


def test_mlx_lm_finds_the_same_modules(tmp_path: Path) -> None:
    from mlx_lm.utils import MODEL_REMAPPING, _get_classes

    for name in ["llama", "qwen3_moe", "gemma4_unified", *MODEL_REMAPPING]:
        model_class, _ = _get_classes({"model_type": name})
        assert model_class.__module__ == f"mlx_lm.models.{module_of({'model_type': name})}"
