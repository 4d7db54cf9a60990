"""Errors as Ollama writes them, on all of its routes."""

from typing import Any

from starlette.types import Scope

from mlx_server.errors import ServerError

PREFIX = "/api/"

REFUSED = frozenset(f"{PREFIX}{name}" for name in ("copy", "create", "delete", "pull", "push"))
"""Routes that only say why they do nothing."""


def is_ollama(scope: Scope) -> bool:
    path: str = scope.get("path", "")
    return path.startswith(PREFIX)


def error_body(error: ServerError) -> dict[str, Any]:
    return {"error": error.body()["error"]["message"]}
