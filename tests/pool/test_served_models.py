"""Models are found by id and alias, and `model:adapter` is split."""

import pytest

from mlx_server.errors import ModelNotFound
from mlx_server.pool.prepare import ModelSpec
from mlx_server.pool.served_models import ServedModels

MODELS = ServedModels(
    [ModelSpec("qwen", "/models/qwen", aliases=("gpt-4", "q:4")), ModelSpec("glm", "/models/glm")]
)


@pytest.mark.parametrize("name", ["qwen", "gpt-4", "q:4"])
def test_a_model_is_found_by_its_id_and_by_each_alias(name: str) -> None:
    assert name in MODELS
    assert MODELS.find(name) is MODELS["qwen"]


def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    assert "llama" not in MODELS
    with pytest.raises(ModelNotFound, match=r"'llama' is not served here.*qwen"):
        MODELS.find("llama")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen:sql", ("qwen", "sql")),
        ("gpt-4:sql", ("gpt-4", "sql")),
        ("q:4", ("q:4", None)),
        ("q:4:sql", ("q:4", "sql")),
        ("qwen:", ("qwen:", None)),
        ("llama:sql", ("llama:sql", None)),
    ],
)
def test_a_name_is_split_where_a_model_ends(name: str, expected: tuple[str, str | None]) -> None:
    assert MODELS.split(name) == expected
