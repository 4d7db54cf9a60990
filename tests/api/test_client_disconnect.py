"""Work ends with its client, and its result or error is passed on."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest
from starlette.requests import ClientDisconnect, Request

from mlx_server.api.handlers import while_connected

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Client:
    """Sends a message at a time, and leaves when it is told to."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.received = 0

    async def receive(self) -> dict[str, str]:
        self.received += 1
        if self.received > 1:
            await self.leaves.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request"}


async def outcome(client: Client, work: Coroutine[Any, Any, str]) -> str:
    return await while_connected(cast(Request, client), work)


async def test_the_result_or_the_error_is_that_of_the_work() -> None:
    async def done() -> str:
        return "done"

    async def failing() -> str:
        raise ZeroDivisionError

    assert await outcome(Client(), done()) == "done"
    with pytest.raises(ZeroDivisionError):
        await outcome(Client(), failing())


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    client, ended = Client(), list[str]()

    async def endless() -> str:
        try:
            client.leaves.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("work")
        return ""

    with pytest.raises(ClientDisconnect):
        await outcome(client, endless())
    assert ended == ["work"], "it has ended by then"
