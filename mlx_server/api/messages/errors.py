"""Errors as Anthropic writes them, for its own routes and for its own clients on the others."""

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_server.errors import ContextTooLong, ServerError
from mlx_server.generation.plan import PromptOverflow

PATH = "/v1/messages"
VERSION = "anthropic-version"
"""The header by which Anthropic's clients are known on routes that are also OpenAI's."""

NO_THREADS = "thread_unsupported_request"
"""The code by which Anthropic's tool runner knows that it has to send whole conversations."""

TOO_LONG = "prompt is too long"
"""The words by which agents know that they have to shorten."""

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Error types by status. Other statuses below 500 are `invalid_request_error`, the rest
`api_error`."""


def is_anthropic(scope: Scope) -> bool:
    """Whether the request is in Anthropic's form."""
    path = scope.get("path", "")
    return path == PATH or path.startswith(f"{PATH}/") or VERSION in Headers(scope=scope)


def error_body(error: ServerError, scope: Scope, status: int | None = None) -> dict[str, Any]:
    """The body for one error; `status` overrides the error's own."""
    found = status or error.status
    kind = TYPES.get(found, "invalid_request_error" if found < 500 else "api_error")
    message = error.body()["error"]["message"]
    if isinstance(error, ContextTooLong) and TOO_LONG not in message:
        message = f"{TOO_LONG}: {message}"  # as for an upstream, which says so in words of its own
    details = {"details": {"error_code": NO_THREADS}} if error.code == NO_THREADS else {}
    return {
        "type": "error",
        "error": {"type": kind, "message": message, **details},
        "request_id": scope.get("state", {}).get("request_id"),
    }


def prompt_too_long(overflow: PromptOverflow, tokens: int) -> ContextTooLong:
    """The overflow in Anthropic's words."""
    most = overflow.context - 1
    return ContextTooLong(f"{TOO_LONG}: {tokens} tokens > {most} maximum", param="messages")
