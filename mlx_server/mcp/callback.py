"""An HTTP server on this machine to which the authorization server redirects the owner's browser
after a login."""

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import parse_qs

from mcp.client.auth import AuthorizationCodeResult

from mlx_server.mcp.errors import McpError
from mlx_server.mcp.texts import cut

HOST = "127.0.0.1"
PATH = "/callback"
WAIT_SECONDS = 600.0
"""How long a login waits for the owner to finish it in the browser."""
READ_SECONDS = 10.0
HEAD_BYTES = 16 << 10
ERROR_CHARACTERS = 300

Query = dict[str, str]


class LoginFailed(McpError):
    """The login ended without tokens."""


class Callback:
    """Waits for the redirect that has the `state` of the login; other requests are refused."""

    def __init__(self) -> None:
        self.port = 0
        self._state = ""
        self._serving = set[asyncio.Task[None]]()
        self._answer: asyncio.Future[Query] = asyncio.get_running_loop().create_future()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}{PATH}"

    def expect(self, state: str) -> None:
        self._state = state

    async def result(self) -> AuthorizationCodeResult:
        """The authorization code of the redirect. Raises LoginFailed for an error, and if no
        redirect comes in time."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                found = await self._answer
        except TimeoutError:
            raise LoginFailed(
                "The login was not finished in time. Run the command again."
            ) from None
        if error := found.get("error"):
            said = " ".join(f"{error}: {found.get('error_description', '')}".split())
            shown = cut("".join(filter(str.isprintable, said)).rstrip(" :"), ERROR_CHARACTERS)
            raise LoginFailed(f"The authorization server refused: {shown}.")
        if not found.get("code"):
            raise LoginFailed("The authorization server sent neither a code nor an error.")
        return AuthorizationCodeResult(
            code=found["code"], state=found["state"], iss=found.get("iss")
        )

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def stop(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                status, text = self._answered(head)
                writer.write(_page(status, text))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _answered(self, head: bytes) -> tuple[str, str]:
        method, _, rest = head.decode("latin-1").partition(" ")
        path, _, query = rest.partition(" ")[0].partition("?")
        if method != "GET" or path != PATH:
            return "404 Not Found", "There is nothing here."
        found = {name: values[0] for name, values in parse_qs(query).items()}
        sent = found.get("state", "").encode()
        if not (self._state and hmac.compare_digest(sent, self._state.encode())):
            return "400 Bad Request", "This is not the answer to a login that waits here."
        if not self._answer.done():
            self._answer.set_result(found)
        return "200 OK", "mlx-server has the answer. You can close this page."


def _page(status: str, text: str) -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        f"content-length: {len(text)}\r\nreferrer-policy: no-referrer\r\nconnection: close\r\n\r\n"
        f"{text}"
    ).encode()


@asynccontextmanager
async def callback(port: int = 0) -> AsyncIterator[Callback]:
    """Listens on the port, or on any free one for 0, until the block is left. Raises LoginFailed if
    the port is in use."""
    found = Callback()
    try:
        server = await asyncio.start_server(found.accept, HOST, port, limit=HEAD_BYTES)
    except OSError as error:
        raise LoginFailed(f"The port {port} can't be listened on: {error.strerror}.") from None
    async with server:
        found.port = server.sockets[0].getsockname()[1]
        try:
            yield found
        finally:
            await found.stop()
