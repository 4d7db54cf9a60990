"""A connection to a server, which has its own task.

The SDK has to close a connection in the task that opened it, but several tasks may consume the
events of a response.
"""

import asyncio
import logging

import anyio
from mcp import Client
from mcp.types import Implementation

from mlx_server import __version__
from mlx_server.mcp.errors import ConnectionLost, cause
from mlx_server.mcp.streams import Connect

US = Implementation(name="mlx-server", version=__version__)

CLOSE_SECONDS = 2.0
END_SECONDS = 1.0

# failures are reported to the request that names the server; the SDK would log each traceback
for _chatty in ("mcp", "client", "httpx2"):
    logging.getLogger(_chatty).setLevel(logging.CRITICAL + 1)


class Session:
    def __init__(self, connect: Connect, before: "asyncio.Task[None] | None" = None) -> None:
        """before: the task of an earlier session, which has to end before this one opens."""
        self._connect = connect
        self._before = before
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._failure: BaseException | None = None
        self.task = asyncio.create_task(self._hold())
        """The task that has the connection. It ends after `stop`, when the server is closed."""

    async def client(self) -> Client:
        return await asyncio.shield(self._opened)

    async def failure(self) -> BaseException | None:
        """The error that ended the session, which a pending call does not get from the SDK; None if
        `stop` ended it."""
        if self._closing.is_set():
            return None
        self.stop()
        await asyncio.wait([self.task], timeout=END_SECONDS)
        return self._failure

    def stop(self) -> None:
        self._closing.set()
        if not self._opened.done():
            # a pending call fails at once, although it may take long to end the server
            self._fail(ConnectionLost("The connection was closed."))
            self._scope.cancel()

    async def _hold(self) -> None:
        if self._before:
            await asyncio.wait([self._before])
            self._before = None
        try:
            with self._scope:
                async with Client(self._connect(), cache=None, client_info=US) as client:
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
        self._opened.exception()  # retrieves it, in case no call waits for it any more
