"""A model does what it is for, and a request for anything else is refused by name."""

import pytest

from mlx_server.errors import BadRequest
from mlx_server.generation.plan import prepared_for
from mlx_server.pool.prepare import ModelSpec, PreparedModel, Task
from tests.generation.scripted import pooled, run


def found(spec: ModelSpec, task: Task, name: str = "m") -> PreparedModel:
    pool, _ = pooled(spec)
    return run(pool, prepared_for(task, name, pool))


def test_another_task_is_refused_with_the_route_of_its_own(spec: ModelSpec) -> None:
    assert found(spec, "generate").id == "m"
    with pytest.raises(BadRequest, match=r"/v1/chat/completions.*`task: embed`") as refused:
        found(spec, "embed")
    assert refused.value.param == "model"


def test_no_adapter_has_a_part_in_it(spec: ModelSpec) -> None:
    with pytest.raises(BadRequest, match="without adapters"):
        found(spec, "generate", "m:sql")
