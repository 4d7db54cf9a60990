"""A schema that runs out of time: the client is asked to retry only if it requires the schema."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_server import limits
from mlx_server.errors import CompilerTooSlow
from mlx_server.generation import constraints
from mlx_server.grammars import compiled as module
from mlx_server.grammars.formats import check_schema
from mlx_server.messages import Tool

SLOW: dict[str, Any] = {
    "type": "object",
    "properties": {f"k{at}": {"title": "slow"} for at in range(99)},
    "additionalProperties": False,
    "minProperties": 1,
}


@pytest.fixture(autouse=True)
def _no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module._schemas._found.clear()
    monkeypatch.setattr(limits, "SCHEMA_SECONDS", 0.02)


def grammar(tool: Tool) -> Any:
    spec = SimpleNamespace(context=SimpleNamespace(tools=(tool,)))
    request = SimpleNamespace(prompts=[], format=None, tool_choice="auto")
    prepared = SimpleNamespace(transcript=None, spec=SimpleNamespace(constrain_calls=None))
    return constraints._grammar(cast(Any, prepared), cast(Any, request), cast(Any, spec))


def test_calls_of_an_optional_tool_are_unconstrained() -> None:
    assert grammar(Tool("slow", None, SLOW))[:2] == (None, constraints.NO_TOOL)


def test_one_that_is_required_may_be_sent_again() -> None:
    with pytest.raises(CompilerTooSlow) as error:
        check_schema(SLOW, strict=True)
    assert error.value.status == 503
    assert error.value.headers["Retry-After"] == "1"
    assert f"{limits.SCHEMA_SECONDS} s" in error.value.message
