from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.models import ABILITY_PARAMS, GENERATION_PARAMS, described
from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from mlx_server.pool.prepare import Capabilities
from tests.api.wire import Json

ABLE = Capabilities("qwen3", "qwen3", "4bit", 1000, 4096, True, True, True)


@pytest.fixture(scope="module")
def checkpoint(tiny_path: Path) -> Checkpoint:
    return read_checkpoint(tiny_path)


def test_every_parameter_that_is_listed_is_one_of_chat_completions() -> None:
    listed = {*GENERATION_PARAMS, *(name for names in ABILITY_PARAMS.values() for name in names)}
    assert listed <= ChatBody.model_fields.keys()
    assert set(described(ABLE)["supported_parameters"]) == listed


@pytest.mark.parametrize("ability", ABILITY_PARAMS)
def test_parameters_need_the_ability(ability: str) -> None:
    lacking: Any = {ability: False}
    unable = described(replace(ABLE, **lacking))
    assert listed_without(unable) == set(ABILITY_PARAMS[ability])
    assert unable["capabilities"][ability] is False


def listed_without(facts: Json) -> set[str]:
    return set(described(ABLE)["supported_parameters"]) - set(facts["supported_parameters"])


def test_nothing_is_invented_of_a_model_that_is_not_here() -> None:
    facts = described(None)
    known = {"type", "compatibility_type", "architecture", "capabilities"}
    assert {name for name, value in facts.items() if value is not None} == known


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        ({}, None),
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float16"}, "f16"),
        ({"torch_dtype": ["bfloat16"]}, None),
        ({"quantization": {"group_size": 64, "bits": 4}, "torch_dtype": "bfloat16"}, "4bit"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization": {"bits": "four", "mode": 4}}, None),
        ({"quantization": {"mode": "x" * 100}}, "x" * 32),
        ({"quantization": 4}, None),
    ],
)
def test_quantization(checkpoint: Checkpoint, config: Json, quantization: str | None) -> None:
    assert replace(checkpoint, config=config).quantization == quantization
