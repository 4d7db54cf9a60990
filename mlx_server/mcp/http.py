"""The transport to an untrusted server over streamable HTTP.

A refusal keeps its status and its text, which the SDK drops. Servers that cut a text within an
emoji write half of a surrogate pair as an escape; the SDK refuses the whole message for it, and the
call would never end. Here the half becomes U+FFFD.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import httpx2
from mcp.client import streamable_http
from mcp.client._transport import TransportStreams
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    JSONRPCMessage,
    jsonrpc_message_adapter,
)

from mlx_server import limits
from mlx_server.json_bounds import json_or_none
from mlx_server.mcp.addresses import resolved
from mlx_server.mcp.limits import ConnectionLost, McpError, Meter, ValueMeter, cut, messages_meter
from mlx_server.system.http_transport import BoundedTransport
from mlx_server.system.turns import turn

EVENT_STREAM = "text/event-stream"
PORTS = {"http": 80, "https": 443}
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

READ_SECONDS = 2.0
"""How long the reader waits for the body of an error."""

STATUS = "httpStatus"
"""The key of the HTTP status in the `data` of a JSON-RPC error."""

TEXTS = ("message", "error_description", "detail", "title", "error")
"""The keys that may have the text of an error, among them those of OAuth and of problem details."""


class MessageAdapter:
    """Reads the messages of servers, for both transports."""

    def validate_json(self, data: str | bytes, **options: Any) -> JSONRPCMessage:
        """Raises ValueError for what is not a message."""
        try:
            return jsonrpc_message_adapter.validate_json(data, **options)
        except ValueError as error:
            try:
                text = json.dumps(json.loads(data), ensure_ascii=False)
            except (ValueError, RecursionError):
                raise error from None
            whole = LONE_SURROGATE.sub("\ufffd", text)
            if whole == text:
                raise
        return jsonrpc_message_adapter.validate_json(whole, **options)


MESSAGES = MessageAdapter()

# the SDK has no option for how messages are read
streamable_http.jsonrpc_message_adapter = MESSAGES  # type: ignore[assignment, attr-defined]


@asynccontextmanager
async def http_transport(
    url: str, headers: Mapping[str, str], *, allow_private: bool, auth: httpx2.Auth | None = None
) -> AsyncIterator[TransportStreams]:
    client = httpx2.AsyncClient(
        transport=CheckedTransport(allow_private=allow_private),
        headers={"accept-encoding": "identity", **headers},
        # each call has its own timeout
        timeout=httpx2.Timeout(limits.MCP_OPEN_SECONDS, read=None),
        auth=auth,
        trust_env=False,  # the addresses to which a proxy connects can't be checked
    )
    async with (
        client,
        streamable_http.streamable_http_client(
            url, http_client=client, max_sse_event_size=limits.MCP_MESSAGE_BYTES
        ) as streams,
    ):
        yield streams


class CheckedTransport(httpx2.AsyncBaseTransport):
    """Connects only to checked addresses, also after redirects, and limits the received bytes."""

    def __init__(self, *, allow_private: bool) -> None:
        self._inner = BoundedTransport(trust_env=False)
        self._all, self._events = Meter(limits.MCP_SESSION_BYTES), messages_meter()
        self._allow_private = allow_private

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        host, port = request.url.host, request.url.port or PORTS[request.url.scheme]
        addresses = await resolved(host, port, allow_private=self._allow_private)
        response = await self._first_that_answers(request, addresses)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()  # a few compressed bytes may expand to any size
            raise ConnectionLost("The server sent compressed data, which was not requested.")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        # a body is one message; of a stream's messages the SDK limits the size of each
        is_stream = response.headers.get("content-type", "").lower().startswith(EVENT_STREAM)
        meters = [self._all] if is_stream else [self._all, Meter(limits.MCP_MESSAGE_BYTES)]
        counted = httpx2.Response(
            response.status_code,
            headers=response.headers,
            stream=_CountedStream(
                response.stream, meters, ValueMeter(self._events if is_stream else None)
            ),
            extensions=response.extensions,
        )
        # an OAuth request has no MCP message
        is_message = request.method == "POST" and EVENT_STREAM in request.headers.get("accept", "")
        return await explained(counted, request) if counted.is_error and is_message else counted

    async def _first_that_answers(
        self, request: httpx2.Request, addresses: list[str]
    ) -> httpx2.Response:
        for address in addresses[:-1]:
            try:
                return await self._inner.handle_async_request(_to(request, address))
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                continue
        return await self._inner.handle_async_request(_to(request, addresses[-1]))

    async def aclose(self) -> None:
        await self._inner.aclose()


def _to(request: httpx2.Request, address: str) -> httpx2.Request:
    """The request, sent to this address. Certificates are still checked for the host's name."""
    return httpx2.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.host},
    )


class _CountedStream(httpx2.AsyncByteStream):
    def __init__(
        self, inner: httpx2.AsyncByteStream, meters: Sequence[Meter], values: ValueMeter
    ) -> None:
        self._inner, self._meters, self._values = inner, meters, values

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            await turn()
            for meter in self._meters:
                meter.count(len(chunk))
            self._values.count(chunk)
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


async def explained(response: httpx2.Response, request: httpx2.Request) -> httpx2.Response:
    """The refusal as a JSON-RPC error, which the SDK passes on. A body that is JSON-RPC already is
    not changed. Raises McpError for a body that is too long."""
    body = await _body(response)
    answer = json_or_none(body)
    if not (isinstance(answer, dict) and "jsonrpc" in answer and "error" in answer):
        is_plain = response.headers.get("content-type", "").lower().startswith("text/plain")
        said = body.decode(errors="replace") if answer is None and is_plain else answer
        error = {
            "code": _code(response.status_code, request.headers),
            "message": cut(_refusal_sentence(response, said), limits.QUOTED_ERROR_CHARACTERS),
            "data": {STATUS: response.status_code},
        }
        body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
    others = [(n, v) for n, v in response.headers.multi_items() if not n.startswith("content-")]
    headers = [*others, ("content-type", "application/json")]
    return httpx2.Response(
        response.status_code, headers=headers, content=body, extensions=response.extensions
    )


def status_of(data: object) -> int | None:
    """The HTTP status in the `data` of a JSON-RPC error; None if it has none."""
    status = data.get(STATUS) if isinstance(data, dict) else None
    return status if type(status) is int and 400 <= status < 600 else None


async def _body(response: httpx2.Response) -> bytes:
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await response.aread()
    except (TimeoutError, httpx2.HTTPError, McpError):
        return b""
    finally:
        await response.aclose()


def _refusal_sentence(response: httpx2.Response, said: object) -> str:
    text = " ".join(_error_message(said).split())
    status = response.status_code
    name = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    answered = f"The server answered {status} {name}".rstrip()
    return f"{answered}: {text}" if text else f"{answered}."


def _error_message(said: object) -> str:
    match said:
        case str():
            return said
        case {"error": {"message": str(message)}}:
            return message
        case dict():
            return next((said[name] for name in TEXTS if isinstance(said.get(name), str)), "")
    return ""


def _code(status: int, headers: Mapping[str, str]) -> int:
    """The code that the SDK itself uses for this status. For some of them it tries an older
    protocol."""
    if status != HTTPStatus.NOT_FOUND:
        return INTERNAL_ERROR
    return INVALID_REQUEST if "mcp-session-id" in headers else METHOD_NOT_FOUND
