"""Makes the headers that authenticate this server to an upstream."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import httpx2
import msgspec

from mlx_server import limits
from mlx_server.errors import UpstreamFailed
from mlx_server.upstream.failures import refusal
from mlx_server.upstream.responses import limited
from mlx_server.upstream.spec import UpstreamSpec

IAM_URL = "https://iam.cloud.ibm.com"
"""The server that issues tokens for watsonx."""

GRANT = "urn:ibm:params:oauth:grant-type:apikey"
EARLY_SECONDS = 300.0
"""How long before its expiry a token is replaced. One with a short life is replaced in the last
fifth of it."""

Environ = Mapping[str, str]


class Credentials(Protocol):
    async def headers(self) -> Mapping[str, str]: ...

    def refused(self) -> bool:
        """Records that the upstream refused the headers. Returns whether `headers` can give new
        ones."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """The texts that must not appear in any message."""


class ApiKey:
    """The key of an environment variable, which is sent as a bearer token; without a variable
    nothing is sent."""

    def __init__(self, variable: str | None, environ: Environ = os.environ) -> None:
        self._variable = variable
        self._environ = environ

    async def headers(self) -> Mapping[str, str]:
        return {"authorization": f"Bearer {self.key()}"} if self._variable else {}

    def refused(self) -> bool:
        return False

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self._environ.get(self._variable or "", ""),)

    def key(self) -> str:
        key = self._environ.get(self._variable or "", "").strip()
        if not key.isascii() or not key.isprintable() or not key:
            raise UpstreamFailed(
                f"The environment variable {self._variable} has no key for the upstream. Set it "
                "where the server is started."
            )
        return key


class IamToken:
    """An IBM Cloud token for a key. All requests share it, and it is replaced before it expires."""

    def __init__(
        self,
        key: ApiKey,
        url: str,
        client: Callable[[], httpx2.AsyncClient],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key
        self._url = f"{url.rstrip('/')}/identity/token"
        self._client = client
        self._clock = clock
        self._token = ""
        self._renew_at = 0.0
        self._fetching = asyncio.Lock()

    async def headers(self) -> Mapping[str, str]:
        async with self._fetching:
            if not self._token or self._clock() >= self._renew_at:
                await self._fetch()
            return {"authorization": f"Bearer {self._token}"}

    def refused(self) -> bool:
        had_one, self._token = bool(self._token), ""
        return had_one

    @property
    def secrets(self) -> tuple[str, ...]:
        return (*self._key.secrets, self._token)

    async def _fetch(self) -> None:
        form = {"grant_type": GRANT, "apikey": self._key.key()}
        async with self._client().stream("POST", self._url, data=form) as response:
            body = await limited(response, limits.UPSTREAM_ERROR_BYTES)
        if response.status_code != 200:
            status = 401 if response.status_code in (400, 403, 413, 422) else response.status_code
            # its words are not shown, since they may quote the form with the key
            raise refusal("watsonx's identity service", status, b"")
        try:
            found = msgspec.json.decode(body, type=_Token)
        except msgspec.MsgspecError:
            raise UpstreamFailed("watsonx's identity service sent no token.") from None
        lifetime = max(0.0, found.expires_in)
        self._token = found.access_token
        self._renew_at = self._clock() + max(0.8 * lifetime, lifetime - EARLY_SECONDS)


class _Token(msgspec.Struct):
    access_token: str
    expires_in: float


def credentials_of(spec: UpstreamSpec, client: Callable[[], httpx2.AsyncClient]) -> Credentials:
    key = ApiKey(spec.api_key_env)
    return IamToken(key, IAM_URL, client) if spec.kind == "watsonx" else key
