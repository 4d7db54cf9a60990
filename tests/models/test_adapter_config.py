"""adapter_config.json of both libraries: what is read of it, and what is refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.errors import AdapterInvalid
from mlx_server.models.adapter_config import (
    LARGEST,
    PEFT_EXTRAS,
    AdapterConfig,
    invalid,
    read_config,
)

FOLDER = Path("/secret/place/mine")
MOST = limits.ADAPTER_RANK

MLX = {
    "fine_tune_type": "lora",
    "model": "org/base",
    "num_layers": 4,
    "lora_parameters": {"rank": 8, "scale": 2.0},
}
PEFT = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 8, "lora_alpha": 16}


def read(config: Any) -> AdapterConfig:
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    return read_config(FOLDER, text)


def refusal(config: Any) -> str:
    with pytest.raises(AdapterInvalid) as refused:
        read(config)
    said = refused.value.message
    assert said.startswith("Adapter 'mine' ")
    assert "secret" not in said
    assert len(said) < 400
    return said


def mlx(**parameters: Any) -> dict[str, Any]:
    return {**MLX, "lora_parameters": {**MLX["lora_parameters"], **parameters}}  # type: ignore[dict-item]


def test_both_formats_have_the_same_facts() -> None:
    assert read(MLX) == AdapterConfig("mlx", "lora", "org/base", 8)
    assert read(PEFT) == AdapterConfig("peft", "lora", "org/base", 8)


def test_the_kind_is_lora_unless_it_is_said() -> None:
    assert read({**MLX, "fine_tune_type": "dora"}).kind == "dora"
    assert read({name: value for name, value in MLX.items() if name[0] != "f"}).kind == "lora"
    assert read({**PEFT, "use_dora": True}).kind == "dora"


@pytest.mark.parametrize("base", [None, "", 5, ["org/base"]])
def test_a_base_that_is_no_name_is_none(base: Any) -> None:
    assert read({**MLX, "model": base}).base is None
    assert read({**PEFT, "base_model_name_or_path": base}).base is None


def test_layers_of_different_ranks_have_none_in_common() -> None:
    assert read({**PEFT, "rank_pattern": {"q_proj": 4}}).rank is None
    assert read({**PEFT, "rank_pattern": {}, "alpha_pattern": None}).rank == 8


def test_settings_that_change_nothing_are_accepted() -> None:
    unused = dict.fromkeys(PEFT_EXTRAS, None) | {"modules_to_save": [], "lora_bias": False}
    assert read({**PEFT, **unused, "bias": "none", "target_modules": "all-linear"})
    assert read(mlx(keys=None, dropout=0.1))
    assert read(mlx(keys=["self_attn.q_proj"]))
    for way in (True, False, "gaussian", "eva", "orthogonal"):
        assert read({**PEFT, "init_lora_weights": way})


def test_the_older_name_of_the_layers_is_read() -> None:
    older = {key: value for key, value in MLX.items() if key != "num_layers"}
    assert read({**older, "lora_layers": 4})
    assert "`num_layers`" in refusal(older)


@pytest.mark.parametrize("rank", [1, MOST])
def test_ranks_at_the_limits(rank: int) -> None:
    assert read(mlx(rank=rank)).rank == rank
    assert read({**PEFT, "r": rank}).rank == rank


@pytest.mark.parametrize("rank", [0, -1, MOST + 1, 8.0, "8", None, True, [8], 10**400])
def test_a_rank_that_is_none_is_named(rank: Any) -> None:
    named = f"a rank from 1 to {MOST} as"
    assert f"{named} `rank`" in refusal(mlx(rank=rank))
    assert f"{named} `r`" in refusal({**PEFT, "r": rank})
    assert f"{named} `q`" in refusal({**PEFT, "rank_pattern": {"q": rank}})


@pytest.mark.parametrize("number", [0, -1.5, LARGEST, -LARGEST])
def test_scales_may_be_any_sensible_number(number: float) -> None:
    read(mlx(scale=number))
    read({**PEFT, "lora_alpha": number, "alpha_pattern": {"q": number}})


@pytest.mark.parametrize(
    "number", [LARGEST * 1.1, float("inf"), float("nan"), "2", None, True, {}, 10**400]
)
def test_a_number_that_is_none_is_named(number: Any) -> None:
    assert "a number as `scale`" in refusal(mlx(scale=number))
    assert "a number as `lora_alpha`" in refusal({**PEFT, "lora_alpha": number})
    assert "a number as `q`" in refusal({**PEFT, "alpha_pattern": {"q": number}})


@pytest.mark.parametrize("name", PEFT_EXTRAS)
def test_what_peft_trains_besides_is_named(name: str) -> None:
    assert f"uses `{name}`" in refusal({**PEFT, name: ["lm_head"]})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Run `git lfs pull`"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"r": ' + b"1" * 5000 + b"}", "is not JSON"),
        (5, "should be a JSON object"),
        ({}, "no `lora_parameters`"),
        ({**MLX, "fine_tune_type": ["lora"]}, "fine_tune_type a list"),
        ({**MLX, "fine_tune_type": None}, "fine_tune_type None"),
        ({**MLX, "fine_tune_type": "x" * 10_000}, "only lora and dora"),
        ({**MLX, "fine_tune_type": "full"}, "`mlx_lm.fuse`"),
        ({**MLX, "num_layers": True}, "`num_layers`"),
        ({**MLX, "num_layers": 4.0}, "`num_layers`"),
        ({**MLX, "lora_parameters": {"rank": 8, "alpha": 16}}, "`scale` should be"),
        (mlx(keys="self_attn.q_proj"), "a list of names as `keys`"),
        (mlx(keys=["a", None]), "a list of names as `keys`"),
        ({**PEFT, "peft_type": None}, "peft_type None"),
        ({**PEFT, "peft_type": {"x": {}}}, "peft_type an object"),
        ({**PEFT, "bias": None}, "trains biases"),
        *(
            ({**PEFT, "init_lora_weights": way}, f"has the init_lora_weights {way!r}")
            for way in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")
        ),
        ({**PEFT, "target_modules": 5}, "names as `target_modules`"),
        ({**PEFT, "target_modules": ["a", 5]}, "names as `target_modules`"),
        ({**PEFT, "alpha_pattern": "x"}, "an object as `alpha_pattern`"),
        ({**PEFT, "rank_pattern": {"x" * 10_000: 0}}, "a rank from 1"),
        ({**PEFT, "alpha_pattern": {"x" * 10_000: None}}, "a number as"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_config_that_can_not_be_served_is_refused_in_a_sentence(config: Any, says: str) -> None:
    assert says in refusal(config)


def test_a_message_names_the_folder_and_not_where_it_is() -> None:
    assert invalid(FOLDER, "is too small").message == "Adapter 'mine' is too small."
