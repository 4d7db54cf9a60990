"""A connection to a server, held by a task of its own.

What the SDK opens in one task has to be closed in the same one, while the events of a response are
asked for by whichever task comes.
"""

import asyncio
import logging

import anyio
from mcp import Client

from mlx_server.mcp.errors import ConnectionLost, cause
from mlx_server.mcp.streams import Connect

CLOSE_SECONDS = 2.0
END_SECONDS = 1.0

# A server's mistakes are told to who asked for it, and would fill our log with tracebacks.
for _chatty in ("mcp", "client", "httpx2"):
    logging.getLogger(_chatty).setLevel(logging.CRITICAL + 1)


class Session:
    def __init__(self, connect: Connect, before: "asyncio.Task[None] | None" = None) -> None:
        """before: another one's task, which has to end first."""
        self._connect = connect
        self._before = before
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._failure: BaseException | None = None
        self.task = asyncio.create_task(self._hold())
        """Ends some time after `stop`, with everything that it held."""

    async def client(self) -> Client:
        return await asyncio.shield(self._opened)

    async def failure(self) -> BaseException | None:
        """Why it ended by itself; who waits for an answer only hears that there will be none."""
        if self._closing.is_set():  # it was ended by us
            return None
        self.stop()
        await asyncio.wait([self.task], timeout=END_SECONDS)
        return self._failure

    def stop(self) -> None:
        self._closing.set()
        if not self._opened.done():
            self._fail(
                ConnectionLost("The connection was closed.")
            )  # whatever it takes to end the server
            self._scope.cancel()

    async def _hold(self) -> None:
        if self._before:
            await asyncio.wait([self._before])
            self._before = None
        try:
            with self._scope:
                async with Client(self._connect(), cache=None) as client:
                    self._opened.set_result(client)
                    await self._closing.wait()
                    self._scope.deadline = anyio.current_time() + CLOSE_SECONDS
        except Exception as error:
            self._failure = cause(error)
            self._fail(self._failure)
        finally:
            self._fail(ConnectionLost("The connection was closed."))

    def _fail(self, error: BaseException) -> None:
        if self._opened.done():
            return
        self._opened.set_exception(error)
        self._opened.exception()  # it may be that nobody waits any more
