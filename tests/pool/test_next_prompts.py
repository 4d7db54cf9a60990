"""Next prompts are rendered in threads, few at a time, and a failure is no one's error."""

import asyncio
from typing import cast

import pytest

from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import ComputeAhead
from mlx_server.errors import ServerError
from mlx_server.pool.engine_models import NextPrompts


class Engine:
    def __init__(self) -> None:
        self.ahead: list[ComputeAhead] = []

    def compute_ahead(self, command: ComputeAhead) -> None:
        self.ahead.append(command)


@pytest.mark.parametrize(
    ("error", "is_logged"), [(ServerError("no message fits"), False), (KeyError("name"), True)]
)
def test_what_can_not_be_rendered_is_not_sent(
    error: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    command, engine = ComputeAhead("m", [1, 2], 70), Engine()

    def failing() -> ComputeAhead:
        raise error

    async def both() -> None:
        prompts = NextPrompts(lambda: cast(EngineClient, engine))
        for render in (failing, lambda: command):
            prompts.begin("m", render)
        await asyncio.gather(*prompts.rendering._tasks)

    asyncio.run(both())
    assert engine.ahead == [command]
    assert ("next prompt" in caplog.text) == is_logged
