"""Every setting is validated strictly, and what is wrong with it never shows its value."""

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, SecretStr, ValidationError

from mlx_server import config
from mlx_server.config.frozen import FROZEN


class Example(BaseModel):
    model_config = FROZEN
    name: str = "a"
    count: int = 1
    seconds: float = 1.0
    key: SecretStr = SecretStr("")


def models() -> Iterator[type[BaseModel]]:
    for module in pkgutil.iter_modules(config.__path__, f"{config.__name__}."):
        for each in vars(importlib.import_module(module.name)).values():
            if isinstance(each, type) and issubclass(each, BaseModel) and each is not BaseModel:
                yield each


MODELS = sorted(set(models()), key=lambda each: each.__qualname__)


@pytest.mark.parametrize("model", MODELS)
def test_all_settings_are_validated_so(model: type[BaseModel]) -> None:
    assert model.model_config.items() >= FROZEN.items()


def test_there_are_some() -> None:
    assert {"Settings", "ServerSettings", "ConnectorSettings"} <= {m.__name__ for m in MODELS}


@pytest.mark.parametrize(
    "given",
    [
        {"nmae": "hunter2"},
        {"name": 5021},
        {"count": "5021"},
        {"count": True},
        {"count": 1.0},
        {"seconds": "5021.0"},
        {"seconds": float("inf")},
        {"seconds": float("nan")},
        {"key": ["hunter2"]},
        {"name": {"hunter2": 1}},
    ],
)
def test_a_mistake_is_refused_and_its_value_is_not_shown(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as refused:
        Example.model_validate(given)
    (field,) = given
    (problem,) = refused.value.errors(include_url=False, include_input=False)
    assert problem["loc"] == (field,)
    for secret in ("hunter2", "5021", "inf,", "True", "input_value"):
        assert secret not in str(refused.value)


def test_whole_numbers_are_numbers_of_seconds() -> None:
    assert Example.model_validate({"seconds": 5}).seconds == 5.0


def test_settings_can_not_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Example().count = 2
