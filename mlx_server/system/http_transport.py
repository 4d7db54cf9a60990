"""An HTTP transport to servers that may be hostile: it reads little at a time, and bounds headers.

The library reads 64 KiB at a time and parses all responses in it, of which there may be thousands
before the final one, without a turn for other tasks.
"""

import ssl
from typing import Any

import httpcore2
import httpx2

from mlx_server import limits
from mlx_server.system.turns import turn

READ_BYTES = 4 << 10


class BoundedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # the library's own transport takes no backend
        self._pool._network_backend = _Backend()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        stream = response.extensions["network_stream"]
        if isinstance(stream, _Stream):
            stream.headers_end()
        return response


class _Backend(httpcore2.AnyIOBackend):
    async def connect_tcp(self, *arguments: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
        return _Stream(await super().connect_tcp(*arguments, **options))


class _Stream(httpcore2.AsyncNetworkStream):
    def __init__(self, inner: httpcore2.AsyncNetworkStream) -> None:
        self._inner = inner
        self._in_headers = True
        self._size = 0
        """The bytes of the current response's headers."""

    def headers_end(self) -> None:
        self._in_headers = False

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        await turn()
        data = await self._inner.read(min(max_bytes, READ_BYTES), timeout)
        self._size += len(data)
        if self._in_headers and self._size > limits.UPSTREAM_HEADER_BYTES:
            raise httpcore2.RemoteProtocolError("The headers are too long.")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._in_headers, self._size = True, 0
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        return _Stream(await self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
