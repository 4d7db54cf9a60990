"""The transport to an untrusted server over streamable HTTP."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx2
from mcp.client import streamable_http

from mlx_server.mcp.addresses import resolved
from mlx_server.mcp.errors import ConnectionLost
from mlx_server.mcp.limits import McpLimits
from mlx_server.mcp.messages import MESSAGES
from mlx_server.mcp.oauth import Authorization, authorization
from mlx_server.mcp.refusals import explained
from mlx_server.mcp.streams import Meter, Streams, ValueMeter
from mlx_server.system.http_transport import BoundedTransport
from mlx_server.system.turns import turn

# the SDK has no option for how messages are read
streamable_http.jsonrpc_message_adapter = MESSAGES  # type: ignore[assignment, attr-defined]

EVENT_STREAM = "text/event-stream"
PORTS = {"http": 80, "https": 443}


@asynccontextmanager
async def http_transport(
    url: str,
    headers: Mapping[str, str],
    limits: McpLimits,
    *,
    allow_private: bool,
    oauth: Authorization | None = None,
) -> AsyncIterator[Streams]:
    client = httpx2.AsyncClient(
        transport=CheckedTransport(limits, allow_private=allow_private),
        headers={"accept-encoding": "identity", **headers},
        timeout=httpx2.Timeout(limits.open_seconds, read=None),  # each call has its own timeout
        auth=authorization(url, oauth) if oauth else None,
        trust_env=False,  # the addresses to which a proxy connects can't be checked
    )
    async with (
        client,
        streamable_http.streamable_http_client(
            url, http_client=client, max_sse_event_size=limits.message_bytes
        ) as streams,
    ):
        yield streams


class CheckedTransport(httpx2.AsyncBaseTransport):
    """Connects only to checked addresses, also after redirects, and limits the received bytes."""

    def __init__(self, limits: McpLimits, *, allow_private: bool) -> None:
        self._inner = BoundedTransport(trust_env=False)
        self._limits = limits
        self._all = Meter(limits.session_bytes)
        self._allow_private = allow_private

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        host, port = request.url.host, request.url.port or PORTS[request.url.scheme]
        addresses = await resolved(host, port, allow_private=self._allow_private)
        response = await self._first_that_answers(request, addresses)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()  # a few compressed bytes may expand to any size
            raise ConnectionLost("The server sent compressed data, which was not requested.")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        counted = httpx2.Response(
            response.status_code,
            headers=response.headers,
            stream=_CountedStream(response.stream, self._all, *self._alone(response)),
            extensions=response.extensions,
        )
        if not (counted.is_error and _is_message(request)):
            return counted
        return await explained(counted, request, self._limits.error_characters)

    def _alone(self, response: httpx2.Response) -> tuple[ValueMeter, Meter | None]:
        """The limits of a body, which is one message, or of each message of a stream, whose size
        the SDK limits."""
        is_stream = response.headers.get("content-type", "").lower().startswith(EVENT_STREAM)
        size = None if is_stream else Meter(self._limits.message_bytes)
        return ValueMeter(is_stream=is_stream), size

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


def _is_message(request: httpx2.Request) -> bool:
    """Whether the request has an MCP message, and is not an OAuth request."""
    return request.method == "POST" and EVENT_STREAM in request.headers.get("accept", "")


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
        self, inner: httpx2.AsyncByteStream, all: Meter, values: ValueMeter, size: Meter | None
    ) -> None:
        self._inner = inner
        self._meters = [all] if size is None else [all, size]
        self._values = values

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            await turn()
            for meter in self._meters:
                meter.count(len(chunk))
            self._values.count(chunk)
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()
