"""Preserves the status and the text with which a server refuses a request, which the SDK drops."""

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import httpx2
from mcp.types import INTERNAL_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND

from mlx_server.mcp.errors import McpError
from mlx_server.mcp.texts import cut

READ_SECONDS = 2.0
"""How long the reader waits for the body of an error."""

STATUS = "httpStatus"
"""The key of the HTTP status in the `data` of a JSON-RPC error."""

TEXTS = ("message", "error_description", "detail", "title", "error")
"""The keys that may have the text of an error, among them those of OAuth and of problem details."""


async def explained(
    response: httpx2.Response, request: httpx2.Request, longest: int
) -> httpx2.Response:
    """The refusal as a JSON-RPC error, which the SDK passes on. A body that is JSON-RPC already is
    not changed. Raises McpError for a body that is too long."""
    body = await _body(response)
    found = _json_or_none(body)
    if not (isinstance(found, dict) and "jsonrpc" in found and "error" in found):
        message = _refusal_sentence(
            response, found if found is not None else _plain_text(response, body)
        )
        error = {
            "code": _code(response.status_code, request.headers),
            "message": cut(message, longest),
            "data": {STATUS: response.status_code},
        }
        body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
    kept = [(n, v) for n, v in response.headers.multi_items() if not n.startswith("content-")]
    headers = [*kept, ("content-type", "application/json")]
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


def _json_or_none(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _plain_text(response: httpx2.Response, body: bytes) -> str:
    is_plain = response.headers.get("content-type", "").lower().startswith("text/plain")
    return body.decode(errors="replace") if is_plain else ""


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
