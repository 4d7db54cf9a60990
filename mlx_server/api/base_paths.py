"""Takes the paths that clients make from a base URL with one `/v1` too few or too many.

Whether a base URL ends with `/v1` differs by client: Anthropic's add `/v1`, OpenAI's don't, and
some drop it. The servers of llama.cpp and mlx-lm take OpenAI's paths without it, too. A base URL
that ends with a slash makes two of them. Monitors ask with HEAD whether a server answers.
"""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

VERSION = "/v1"
ONE_TOO_MANY = (f"{VERSION}{VERSION}/", f"{VERSION}/api/")
"""What Anthropic's and Ollama's clients ask for, given a base URL with `/v1`."""

VERSIONED = {
    "chat",
    "completions",
    "conversations",
    "embeddings",
    "messages",
    "models",
    "rerank",
    "responses",
}
"""The first segments of paths that OpenAI's and Anthropic's APIs have below `/v1`."""

SLASHES = re.compile("/{2,}")
MONITORED = re.compile("/health|/metrics|/v1/models(/.*)?")
"""HEAD of these paths is answered as GET is, and the body is left out as it is sent."""


class BasePaths:
    """ASGI middleware in front of all that looks at a request's path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in {"http", "websocket"}:
            scope["path"] = served_path(scope["path"])
        if scope.get("method") == "HEAD" and MONITORED.fullmatch(scope["path"]):
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def served_path(path: str) -> str:
    """The path of the route that was meant."""
    path = SLASHES.sub("/", path)
    path = path.rstrip("/") or path[:1]
    if path.startswith(ONE_TOO_MANY):
        return path.removeprefix(VERSION)
    first = path.removeprefix("/").partition("/")[0]
    return VERSION + path if first in VERSIONED else path
