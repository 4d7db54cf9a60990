"""Sends request bodies to a server of the OpenAI API through OpenAI's own client."""

import os
import ssl
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any
from urllib.parse import urlsplit

from mlx_server.clients.exchange import Wire
from mlx_server.errors import BadRequest, GenerationFailed
from mlx_server.system.listening_sockets import is_loopback

try:
    import openai
except ModuleNotFoundError as error:
    raise ImportError(
        "The clients send requests with OpenAI's package. Install it with "
        "`pip install 'mlx-local-server[clients]'`."
    ) from error

Body = Mapping[str, Any]

CHAT, COMPLETIONS, MODELS = "/chat/completions", "/completions", "/models"

MODELS_SECONDS = 30.0
"""How long the list of models, without which a request can be sent too, is waited for."""

LOCAL_URL = "http://127.0.0.1:8000/v1"
KEY_VARIABLE = "MLX_SERVER_API_KEY"
"""The environment variable with the key of a server on this machine. The settings that
`mlx-server connect` writes refer to it."""

NO_KEY = "none"
"""The key that is sent if there is none, since OpenAI's client refuses to work without a key."""


@dataclass(frozen=True)
class Endpoint:
    base_url: str = LOCAL_URL
    """The URL before the route, `/v1` included."""
    api_key: str | None = None
    """A server on this machine gets the key of MLX_SERVER_API_KEY if none is given."""
    timeout: float = 600.0
    """In seconds."""
    max_retries: int = 2
    """How often a request is sent again after a 408, 409, 429 or 5xx, or a lost connection."""

    def send(self, body: Body, route: str = CHAT) -> Wire:
        return _json_object(self._client.post(route, body=dict(body), cast_to=object))

    def stream(self, body: Body, route: str = CHAT) -> Iterator[Wire]:
        """The chunks of the answer. Closing the iterator early cancels the answer."""
        with self._client.post(
            route,
            body={**body, "stream": True},
            cast_to=object,
            stream=True,
            stream_cls=openai.Stream[object],
        ) as chunks:
            for chunk in chunks:
                yield _json_object(chunk)

    def models(self) -> object:
        """The list of the server's models; None if there is none."""
        client = self._client.with_options(max_retries=0, timeout=MODELS_SECONDS)
        with suppress(openai.OpenAIError, ValueError, RecursionError):
            return client.get(MODELS, cast_to=object)
        return None

    async def asend(self, body: Body, route: str = CHAT) -> Wire:
        async with self._async_client() as client:
            return _json_object(await client.post(route, body=dict(body), cast_to=object))

    async def astream(self, body: Body, route: str = CHAT) -> AsyncIterator[Wire]:
        async with (
            self._async_client() as client,
            await client.post(
                route,
                body={**body, "stream": True},
                cast_to=object,
                stream=True,
                stream_cls=openai.AsyncStream[object],
            ) as chunks,
        ):
            async for chunk in chunks:
                yield _json_object(chunk)

    @cached_property
    def _client(self) -> openai.OpenAI:
        """The client for `send` and `stream`. Its connections close when the endpoint is garbage
        collected."""
        http = openai.DefaultHttpxClient(**self._transport)
        weakref.finalize(self, http.close)
        return openai.OpenAI(**self._options, http_client=http)

    def _async_client(self) -> openai.AsyncOpenAI:
        """A new client for each request, since a connection belongs to the event loop that opened
        it, and an endpoint may be used from several."""
        http = openai.DefaultAsyncHttpxClient(**self._transport)
        return openai.AsyncOpenAI(**self._options, http_client=http)

    @property
    def _options(self) -> Wire:
        key = self.api_key or (os.environ.get(KEY_VARIABLE) if self._is_local else None)
        return {
            "base_url": self.base_url,
            "api_key": key or NO_KEY,
            "timeout": self.timeout,
            "max_retries": self.max_retries,
        }

    @property
    def _transport(self) -> Wire:
        """Options of the HTTP client. Requests to this machine go to no proxy, and need not load
        certificates."""
        return {"trust_env": False, "verify": False} if self._is_local else {"verify": _tls()}

    @cached_property
    def _is_local(self) -> bool:
        host = urlsplit(self.base_url).hostname
        if not host:
            raise BadRequest(f"{self.base_url!r} is not a URL. Give one like {LOCAL_URL}.")
        return is_loopback(host)


@cache
def _tls() -> ssl.SSLContext:
    """The TLS context, made once since reading the certificates takes 15 ms."""
    return ssl.create_default_context()


def _json_object(answer: object) -> Wire:
    if isinstance(answer, dict):
        return answer
    raise GenerationFailed("The answer is not in the format of OpenAI's API. Check the base URL.")
