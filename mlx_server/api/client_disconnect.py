"""Cancels work when the client disconnects.

A client that closes only its sending side, which HTTP allows, counts as disconnected: the server
can't tell the two apart.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def while_connected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Cancels it and raises ClientDisconnect when the client leaves.

    The body must have been read, so that the next message can only be the disconnect.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
