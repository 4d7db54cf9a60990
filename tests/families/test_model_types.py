"""Every model type that the installed mlx-lm can run has a family, chosen here by hand."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken

from mlx_server.families import family_of
from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from tests.families import byte_level, write_checkpoint

FAMILY_OF = {
    "apertus": "apertus",
    "cohere": "command",
    "cohere2": "command",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v41": "deepseek_v32",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5",
    "exaone4": "exaone4",
    "exaone_moe": "exaone4",
    "gemma": "gemma3",
    "gemma2": "gemma3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma3n": "gemma3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "glm": "glm4",
    "glm4": "glm4",
    "glm4_moe": "glm4_5",
    "glm4_moe_lite": "glm4_5",
    "glm_moe_dsa": "glm4_5",
    "gpt_oss": "gpt_oss",
    "granite": "granite",
    "granitemoe": "granite",
    "granitemoehybrid": "granite",
    "hunyuan": "hunyuan",
    "hunyuan_v1_dense": "hunyuan",
    "internlm2": "internlm",
    "internlm3": "internlm",
    "jamba": "jamba",
    "kimi_k25": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "kimi_linear": "kimi_k2",
    "laguna": "glm4_5",
    "lfm2": "lfm2",
    "lfm2-vl": "lfm2",
    "lfm2_moe": "lfm2",
    "llama": "llama3",
    "llama4": "llama4",
    "llama4_text": "llama4",
    "longcat_flash": "longcat",
    "longcat_flash_ngram": "longcat",
    "minicpm": "minicpm",
    "minicpm3": "minicpm",
    "minimax": "minimax_m2",
    "minimax_m3_vl": "minimax_m3",
    "ministral3": "mistral",
    "mistral3": "mistral",
    "mistral4": "mistral",
    "mixtral": "mistral",
    "olmo3": "olmo3",
    "olmo_hybrid": "olmo3",
    "phi3": "phi4",
    "phi3small": "phi4",
    "phimoe": "phi4",
    "pixtral": "mistral",
    "plamo": "plamo",
    "plamo2": "plamo",
    "plamo3": "plamo",
    "qwen2": "qwen3",
    "qwen2_moe": "qwen3",
    "qwen2_vl": "qwen3",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_moe": "qwen3",
    "qwen3_next": "qwen3",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "solar_open": "solar_open",
    "step3p5": "qwen3_5",
}
"""Of a template that shows no calls."""

BY_TEMPLATE = {
    "Klear",
    "afm7",
    "afmoe",
    "baichuan_m1",
    "bailing_hybrid",
    "bailing_moe",
    "bailing_moe_linear",
    "bailing_moe_v3",
    "bitnet",
    "dbrx",
    "deepseek",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "exaone",
    "falcon_h1",
    "gear",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gptj",
    "helium",
    "iquestloopcoder",
    "kimi_vl",
    "lille-130m",
    "mamba",
    "mamba2",
    "mellum",
    "mimo",
    "mimo_v2_flash",
    "muse_glimmer",
    "muse_spark",
    "nanbeige",
    "nanochat",
    "nemotron",
    "nemotron-nas",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmoe",
    "openelm",
    "phi",
    "phixtral",
    "prism_hadamard_qwen35",
    "qwen",
    "recurrent_gemma",
    "rwkv7",
    "spark2_5",
    "stablelm",
    "starcoder2",
    "talkie",
    "telechat3",
    "youtu_llm",
}
"""Types whose models have nothing in common but what their templates show: plain without that."""

END = "<|the_end|>"


def types_of_mlx_lm() -> set[str]:
    spec = importlib.util.find_spec("mlx_lm.models")  # which is not imported
    assert spec
    assert spec.submodule_search_locations
    files = Path(spec.submodule_search_locations[0]).glob("*.py")
    has_model = re.compile(r"^(class Model\(|from \.\w+ import Model\b)", re.MULTILINE)
    return {file.stem for file in files if has_model.search(file.read_text("utf-8"))}


def test_every_type_of_mlx_lm_has_been_thought_of() -> None:
    assert types_of_mlx_lm() == FAMILY_OF.keys() | BY_TEMPLATE
    assert not FAMILY_OF.keys() & BY_TEMPLATE


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    tokenizer = byte_level(AddedToken(END, special=True))
    (end,) = (id for id, token in tokenizer.get_added_tokens_decoder().items())
    folder = tmp_path_factory.mktemp("types")
    config = {"model_type": "tiny", "eos_token_id": end}
    return read_checkpoint(write_checkpoint(folder, tokenizer, config=config), "{{ messages }}")


@pytest.mark.parametrize("model_type", sorted(FAMILY_OF.keys() | BY_TEMPLATE))
def test_a_type_has_its_family_and_its_models_stop(unknown: Checkpoint, model_type: str) -> None:
    checkpoint = replace(unknown, model_type=model_type)
    family = family_of(checkpoint)
    assert family.name == FAMILY_OF.get(model_type, "plain")
    assert checkpoint.tokenizer.id_of(END) in family.stops(checkpoint)
