"""One MCP server of one response: its session, its list of tools, and the calls of them.

The SDK has to close a connection in the task that opened it, but several tasks may consume the
events of a response. So each session has its own task.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import httpx2
from mcp import Client, MCPError, types
from mcp.client._transport import TransportStreams
from mcp.client.auth import OAuthFlowError
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT, Implementation

from mlx_server import __version__, limits
from mlx_server.events import ListedTool
from mlx_server.grammars.view import remote_reference
from mlx_server.json_bounds import json_or_none
from mlx_server.mcp.http import status_of
from mlx_server.mcp.limits import ConnectionLost, McpError, McpRefused, ToolFailed, cause, cut
from mlx_server.messages import ContentPart, Media, media_parts, texts_of
from mlx_server.requests import McpServer

US = Implementation(name="mlx-server", version=__version__)

TYPE_CHARACTERS = 64
"""The longest media type of a picture that is read."""

CLOSE_SECONDS = 2.0
END_SECONDS = 1.0

log = logging.getLogger(__name__)

# failures are reported to the request that names the server; the SDK would log each traceback
for _chatty in ("mcp", "client", "httpx2"):
    logging.getLogger(_chatty).setLevel(logging.CRITICAL + 1)

T = TypeVar("T")
Connect = Callable[[], AbstractAsyncContextManager[TransportStreams]]
Opened = Callable[["Session"], None]


class Session:
    """A connection to a server, which has its own task."""

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


@dataclass
class Listing:
    tools: dict[str, ListedTool] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """The bytes of each tool's name, description and schema together."""
    left_out: list[str] = field(default_factory=list)
    """Sentences that say which tools were left out, and why."""
    failure: str | None = None
    """The reason why the server has no tools at all."""

    @property
    def error(self) -> str | None:
        return self.failure or " ".join(self.left_out) or None


class Lister:
    """Collects a server's tools page by page, up to the limits."""

    def __init__(self, server: McpServer) -> None:
        self.listing = Listing()
        self.full = False
        self._server = server
        self._seen = self._bytes = 0

    def add(self, page: types.ListToolsResult) -> None:
        for tool in page.tools:
            self._seen += 1
            described = (tool.name, tool.description, tool.input_schema)
            size = len(json.dumps(described, ensure_ascii=False).encode("utf-8", "replace"))
            self._bytes += size
            if self._seen > limits.MCP_TOOLS or self._bytes > limits.MCP_SCHEMA_BYTES:
                self.full = True
                self.listing.left_out.append(
                    f"The server has more than {limits.MCP_TOOLS} tools, or more than "
                    f"{limits.MCP_SCHEMA_BYTES} bytes of tools: the rest is left out."
                )
                return
            self._add(tool, size)

    def _add(self, tool: types.Tool, size: int) -> None:
        read_only = bool(tool.annotations and tool.annotations.read_only_hint)
        if not self._server.allowed.holds(tool.name, read_only=read_only):
            return
        if reason := self._objection(tool):
            self.listing.left_out.append(
                f"{tool.name[: limits.TOOL_NAME_CHARACTERS]!r} is left out: {reason}."
            )
            return
        self.listing.sizes[tool.name] = size
        hints = tool.annotations
        annotations = hints.model_dump(by_alias=True, exclude_none=True) if hints else None
        self.listing.tools[tool.name] = ListedTool(
            tool.name, tool.description, tool.input_schema, annotations
        )

    def _objection(self, tool: types.Tool) -> str | None:
        if not 0 < len(tool.name) <= limits.TOOL_NAME_CHARACTERS:
            return f"its name should have 1 to {limits.TOOL_NAME_CHARACTERS} characters"
        if tool.name in self.listing.tools:
            return "another tool has the same name"
        if remote := remote_reference(tool.input_schema):
            return f"its schema refers to {remote[:200]!r}, which is not fetched"
        return None


def bound(listings: Iterable[Listing]) -> None:
    """Leaves out tools until those of all servers of a request together are within the limits."""
    tools, size = 0, 0
    for listing in listings:
        for name in list(listing.tools):
            tools += 1
            size += listing.sizes[name]
            if tools > limits.MCP_ALL_TOOLS or size > limits.MCP_ALL_SCHEMA_BYTES:
                del listing.tools[name]
        if len(listing.tools) < len(listing.sizes):
            listing.left_out.append(
                f"All servers of a request together may have {limits.MCP_ALL_TOOLS} tools and "
                f"{limits.MCP_ALL_SCHEMA_BYTES} bytes of tools: the rest is left out."
            )


@dataclass(frozen=True)
class ToolResult:
    text: str
    """All of it as text."""
    parts: tuple[ContentPart, ...] = ()
    """The texts and pictures of a result that has pictures."""

    def cut(self, longest: int) -> "ToolResult":
        """The result in as many bytes: too much text is truncated, and too large pictures are left
        out."""
        if self.nbytes <= longest:
            return self
        return ToolResult(cut(self.text, longest))

    @property
    def nbytes(self) -> int:
        texts = texts_of(self.parts or self.text)
        return sum(len(text.encode("utf-8", "replace")) for text in texts)


def result_of(result: types.CallToolResult, longest: int) -> ToolResult:
    """longest: the most bytes of its text."""
    parts = [_part(part) for part in result.content]
    if not parts and result.structured_content is not None:  # parts contain it as text too
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(part if isinstance(part, str) else "[image]" for part in parts)
    shortened = cut(text, longest)
    return ToolResult(shortened, media_parts(parts) if shortened == text else ())


def _part(part: types.ContentBlock) -> str | Media:
    match part:
        case types.ImageContent(data=data, mime_type=kind):
            url = {"url": f"data:{kind};base64,{data}"}
            about = " ".join(kind[:TYPE_CHARACTERS].split())
            return Media("image", "", about, {"type": "image_url", "image_url": url})
        case types.TextContent(text=text):
            return text
        case types.EmbeddedResource(resource=types.TextResourceContents(text=text)):
            return text
        case types.ResourceLink(uri=uri):
            return f"[resource link: {uri}]"
        case _:
            return f"[{part.type}]"


class McpConnection:
    """A server with its session, which is reopened once if it is lost."""

    def __init__(self, requested: McpServer, connect: Connect, opened: Opened) -> None:
        """opened: called with each new session, whose task may end later than the response."""
        self.requested = requested
        self.listing = Listing()
        self._connect = connect
        self._opened = opened
        self._session: Session | None = None
        self._openings = 0
        self._last: asyncio.Task[None] | None = None
        """The task of the last session, for whose end the next session waits."""

    def needs_approval(self, tool: str) -> bool:
        listed = self.listing.tools[tool]
        hint = {"read_only": bool((listed.annotations or {}).get("readOnlyHint"))}
        always, never = self.requested.always_approve, self.requested.never_approve
        return always.holds(tool, **hint) or not never.holds(tool, **hint)

    async def open(self) -> None:
        """Opens the session and lists the server's tools. A failure is recorded in `listing`."""
        try:
            self.listing = await self._within(limits.MCP_OPEN_SECONDS, self._list)
        except McpError as error:
            self.listing = Listing(failure=str(error))
            who = self.requested.connector or "an MCP server"  # a client's URL is private
            log.warning("%s has no tools (%s)", who, error.kind)
            self.stop()

    def stop(self) -> None:
        if self._session:
            self._session.stop()
        self._session = None

    def on_closed(self, then: Callable[[], None]) -> None:
        """Calls `then` when the server's process or connection has ended, or now if it has."""
        if self._last is None or self._last.done():
            then()
        else:
            self._last.add_done_callback(lambda _: then())

    async def call(self, tool: str, arguments: str) -> ToolResult:
        """Calls the tool. Raises McpError."""
        given = json_or_none(arguments or "{}")
        if not isinstance(given, dict):
            raise McpError("The arguments are not a JSON object.")

        async def call(session: Session) -> types.CallToolResult:
            # the SDK's `call_tool` would validate the result by a schema of the untrusted server
            request = types.CallToolRequest(
                params=types.CallToolRequestParams(name=tool, arguments=given)
            )
            client = await session.client()
            return await client.session.send_request(request, types.CallToolResult)

        result = await self._within(limits.MCP_CALL_SECONDS, call)
        output = result_of(result, limits.MCP_RESULT_BYTES)
        if result.is_error:
            raise ToolFailed(output.text or "The tool failed without a message.")
        return output

    async def _list(self, session: Session) -> Listing:
        client = await session.client()
        lister = Lister(self.requested)
        cursor, cursors = None, set[str | None]()
        while cursor not in cursors and not lister.full:
            cursors.add(cursor)
            page = await client.list_tools(cursor=cursor)
            lister.add(page)
            cursor = page.next_cursor
            if cursor is None:
                break
        return lister.listing

    async def _within(self, seconds: float, send: Callable[[Session], Awaitable[T]]) -> T:
        if self._session is None:
            if self._openings == limits.MCP_OPENINGS:
                raise ConnectionLost("The server's connection was lost twice.")
            self._openings += 1
            self._session = Session(self._connect, self._last)
            self._last = self._session.task
            self._opened(self._session)
        session = self._session
        try:
            async with asyncio.timeout(seconds):
                return await send(session)
        except TimeoutError:
            public: McpError = ConnectionLost(f"The server did not answer within {seconds:g} s.")
        except Exception as error:
            public = _public_error(cause(error))
        if isinstance(public, ConnectionLost):
            if self._session is session:
                self._session = None
            failure = await session.failure()
            public = _public_error(failure) if failure else public
        raise public from None


def _public_error(error: BaseException) -> McpError:
    most = limits.QUOTED_ERROR_CHARACTERS
    match error:
        case McpError():
            return error
        case MCPError() if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
            return ConnectionLost("The server closed the connection.")
        case MCPError():
            message, status = cut(error.message, most), status_of(error.data)
            return McpRefused(message, status) if status else McpError(message)
        case OAuthFlowError():
            return McpError(cut(f"The server gave no authorization: {error}", most))
        case httpx2.HTTPError() | OSError():
            return ConnectionLost(cut(f"The server can't be reached: {error}", most))
        case _:
            return McpError(f"The server did not follow the protocol ({type(error).__name__}).")
