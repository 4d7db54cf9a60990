"""Every setting is validated strictly, and what is wrong with it never shows its value."""

from dataclasses import dataclass

import pytest
from pydantic import SecretStr, ValidationError

from mlx_server.config.settings import Strict, validated


@dataclass(frozen=True)
class Example(Strict):
    name: str = "a"
    count: int = 1
    seconds: float = 1.0
    key: SecretStr | None = None


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
        validated(Example, given)
    (field,) = given
    (problem,) = refused.value.errors(include_url=False, include_input=False)
    assert problem["loc"] == (field,)
    for secret in ("hunter2", "5021", "inf,", "True", "input_value"):
        assert secret not in str(refused.value)


def test_whole_numbers_are_numbers_of_seconds() -> None:
    assert validated(Example, {"seconds": 5}).seconds == 5.0
