"""A request that names no model gets the first one that generates text."""

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_server.api.models import model_or_default
from mlx_server.errors import ModelNotFound

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pool(*tasks: str) -> Any:
    """A pool whose models have these tasks as their ids; an upstream model is never prepared."""

    async def prepared(id: str) -> Any:
        assert id != "upstream"
        return SimpleNamespace(task=id)

    specs = [SimpleNamespace(id=task, upstream=task == "upstream" or None) for task in tasks]
    return SimpleNamespace(models=SimpleNamespace(specs=specs), prepared=prepared)


@pytest.mark.parametrize(
    ("tasks", "requested", "expected"),
    [
        (("embed", "rerank", "generate", "upstream"), None, "generate"),
        (("embed", "upstream", "generate"), None, "upstream"),
        (("embed", "generate"), "", "generate"),
        (("embed", "generate"), "embed", "embed"),
        ((), "not there", "not there"),
    ],
)
async def test_the_first_that_generates(
    tasks: tuple[str, ...], requested: str | None, expected: str
) -> None:
    assert await model_or_default(pool(*tasks), requested) == expected


@pytest.mark.parametrize("tasks", [(), ("embed", "rerank")])
async def test_none_is_an_error_of_the_request(tasks: tuple[str, ...]) -> None:
    with pytest.raises(ModelNotFound) as refused:
        await model_or_default(pool(*tasks), None)
    assert refused.value.param == "model"
