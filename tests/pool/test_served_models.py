"""Models are found by id and alias, and `model:adapter` is split."""

from dataclasses import replace

import pytest

from mlx_server.errors import ModelNotFound
from mlx_server.pool.models import ServedModels
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from tests.pool.machine import held, run, running

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


@pytest.mark.parametrize("name", ["a", "gpt-4", "default"])
def test_a_model_has_several_names(a: ModelSpec, name: str) -> None:
    pool = Pool([a, replace(a, id="n", aliases=("other",))])
    assert pool.spec(name) is a
    assert pool.spec("other").id == "n"


@pytest.mark.parametrize("name", ["", "A", "gpt", "a ", "x" * 10_000])
def test_an_unknown_model_is_told_what_there_is(a: ModelSpec, b: ModelSpec, name: str) -> None:
    async def test() -> None:
        async with running(a, b) as (pool, machine):
            with pytest.raises(ModelNotFound, match=r"Served: a, b\.") as caught:
                await held(pool, name)
            assert caught.value.param == "model"
            assert len(caught.value.message) < 400
            assert machine.log == []

    run(test)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("qwen3:4b", "qwen3-4b, qwen3-8b, "),
        ("Qwen3-8B-MLX", "qwen3-8b, qwen3-4b, "),
        ("mediocre", "medium, "),
        ("x" * 10_000, ""),
    ],
)
def test_an_unknown_model_is_told_the_nearest_of_many(
    a: ModelSpec, name: str, nearest: str
) -> None:
    ids = ("qwen3-4b", "qwen3-8b", "smollm2", "gpt-oss-20b")
    specs = [replace(a, id=id, aliases=("medium",) if id == ids[1] else ()) for id in ids]
    with pytest.raises(ModelNotFound) as caught:
        Pool(specs).spec(name)
    assert f"The nearest of the 5 that are served: {nearest}" in caught.value.message
    assert len(caught.value.message) < 400


def test_where_nothing_is_served_that_is_said() -> None:
    with pytest.raises(ModelNotFound, match="Served: none"):
        Pool([]).spec("m")
