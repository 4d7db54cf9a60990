"""Error responses: OpenAI's body, on Anthropic's and Ollama's routes theirs, with the status.

Routes raise, and the exception handlers of this module answer. A route that validates a body itself
raises `validation_error`, which uses the body to name the parameter exactly. A prompt that exceeds
the context is reported in each API's own words: clients recognise them, and shorten.
"""

import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import pydantic
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from mlx_server import limits
from mlx_server.errors import (
    BadRequest,
    ContextTooLong,
    Forbidden,
    MethodNotAllowed,
    NotFound,
    ServerError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
)
from mlx_server.generation.plan import PromptOverflow
from mlx_server.http.strict_json import quoted
from mlx_server.wrong_values import sentence

Loc = tuple[int | str, ...]
Problem = Mapping[str, Any]
"""One entry of pydantic's `errors()`."""


BY_STATUS: dict[int, type[ServerError]] = {
    error.status: error
    for error in (
        BadRequest,
        Unauthorized,
        Forbidden,
        NotFound,
        MethodNotAllowed,
        TooLarge,
        UnsupportedMediaType,
        Unavailable,
    )
}

log = logging.getLogger("mlx_server")


def install(app: FastAPI) -> None:
    """Makes every error of the app leave as a JSON body."""
    app.add_exception_handler(ServerError, _server_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _request_validation_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _unexpected)


def error_response(
    error: ServerError,
    scope: Scope,
    *,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The response for one error; `headers` override the error's own."""
    body = _body(error, scope, status)
    # json.dumps writes ASCII: a message may have lone surrogates, which UTF-8 can't encode
    return Response(
        json.dumps(body),
        status_code=status or error.status,
        headers={**error.headers, **(headers or {})},
        media_type="application/json",
    )


def _body(error: ServerError, scope: Scope, status: int | None) -> dict[str, Any]:
    if is_ollama(scope):
        return ollama_error(error)
    return anthropic_error(error, scope, status) if is_anthropic(scope) else error.body()


COMPARED_KEYS = 40
"""The most keys of a body, and the most characters of one, that are compared with a missing one."""


def validation_error(error: pydantic.ValidationError, body: Any) -> BadRequest:
    """The error for the first problem of a client's body."""
    loc, problem = problem_of(error, body)
    wrong = _bad_request(_param_name(loc), problem)
    if problem["type"] == "missing" and len(loc) == 1 and isinstance(body, dict):
        keys = [key for key in islice(body, COMPARED_KEYS) if len(key) <= COMPARED_KEYS]
        for misspelt in difflib.get_close_matches(str(loc[0]), keys, n=1, cutoff=0.8):
            wrong.message += f": did you write `{misspelt}` for it?"
    return wrong


def problem_of(error: pydantic.ValidationError, body: Any) -> tuple[Loc, Problem]:
    """The first problem of a client's body, with the keys that lead to it."""
    problems = error.errors(include_url=False, include_input=False)
    return _first_problem([(_client_loc(problem, body), problem) for problem in problems])


def _param_name(parts: Sequence[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")[: limits.WRONG_FIELD_CHARACTERS]


def _client_loc(problem: Problem, body: Any) -> Loc:
    """The problem's loc, with only the parts that are keys of the client's body."""
    return _walk(tuple(problem["loc"]), body, is_missing=problem["type"] == "missing")


def _walk(loc: Loc, node: Any, *, is_missing: bool) -> Loc:
    if not loc:
        return ()
    head, rest = loc[0], loc[1:]
    if is_missing and not rest:
        return (head,) if isinstance(node, dict) else ()
    skipped = _walk(rest, node, is_missing=is_missing)
    if not _has(node, head):
        return skipped
    kept = (head, *_walk(rest, node[head], is_missing=is_missing))
    # A union's tag may be named like a field: prefer the path that reaches the end of the loc.
    return max(kept, skipped, key=lambda path: (path[-1:] == loc[-1:], len(path)))


def _has(node: Any, part: int | str) -> bool:
    if isinstance(node, list):
        return isinstance(part, int) and 0 <= part < len(node)
    return isinstance(node, dict) and part in node


def _first_problem(problems: Sequence[tuple[Loc, Problem]]) -> tuple[Loc, Problem]:
    first, _ = problems[0]
    # Each member of a union reports a problem: the deepest one is of the member that was meant.
    same_value = [problem for problem in problems if problem[0][: len(first)] == first]
    return max(same_value, key=lambda problem: len(problem[0]))


def _bad_request(param: str, problem: Problem) -> BadRequest:
    what = sentence(problem)
    message = f"`{param}`: {what}" if param else what
    if len(message) > limits.FIELD_ERROR_CHARACTERS:
        message = message[: limits.FIELD_ERROR_CHARACTERS - 3] + "..."
    return BadRequest(message, param=param or None)


async def _server_error(connection: HTTPConnection, error: Exception) -> Response:
    assert isinstance(error, ServerError)
    if connection.scope["type"] == "websocket":  # SecurityMiddleware answers these
        raise error
    return error_response(error, connection.scope)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ServerError):  # FastAPI wraps errors raised by reading a body
        return error_response(error.__cause__, request.scope)
    ours = BY_STATUS.get(error.status_code, BadRequest if error.status_code < 500 else ServerError)
    message = _routing_message(request, error)
    return error_response(
        ours(message), request.scope, status=error.status_code, headers=error.headers
    )


def _routing_message(request: Request, error: HTTPException) -> str:
    route = quoted(f"{request.method} {request.url.path}")
    match error.status_code, error.detail:
        case 404, "Not Found":
            served = _served_paths(request.app)
            if near := difflib.get_close_matches(request.url.path[:100], served, n=1, cutoff=0.88):
                return f"There is no route {route}. Did you mean {near[0]}?"
            return (
                f"There is no route {route}. API routes start with `/v1`. This server generates "
                f"text; it serves {', '.join(served)}."
            )
        case 405, "Method Not Allowed":
            return f"There is no {route}: the path exists, but with other methods."
        case _:
            return str(error.detail)


@lru_cache(maxsize=8)
def _served_paths(app: FastAPI) -> list[str]:
    """The paths of the API, without those below one of them, and those that do nothing."""
    paths = sorted(
        {str(route.path).partition("/{")[0] for route in iter_route_contexts(app.routes)}
    )
    others = ("/", *OLLAMA_REFUSED)
    paths = [path for path in paths if path not in others and not path.startswith("/page/")]
    return [path for path in paths if not any(path.startswith(f"{each}/") for each in paths)]


async def _request_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    sent = {
        "body": error.body,
        "path": request.path_params,
        "query": dict(request.query_params),
        "header": dict(request.headers),
    }
    problems: Sequence[Problem] = error.errors()
    located = [(_client_loc(problem, sent)[1:], problem) for problem in problems]
    loc, problem = _first_problem(located)
    return error_response(_bad_request(_param_name(loc), problem), request.scope)


async def _client_left(request: Request, error: Exception) -> Response:
    left = BadRequest("The client disconnected before its body was complete.")
    return error_response(left, request.scope)


async def _unexpected(request: Request, error: Exception) -> Response:
    state = request.scope.get("state", {})
    log.error("unexpected error in request %s", state.get("request_id"), exc_info=error)
    message = "Internal server error. The server's log has details under this request's id."
    # This response does not pass through SecurityMiddleware, so its headers are added here. uvicorn
    # closes the connection after the error, so the client must not send another request on it.
    headers = {**state.get("response_headers", {}), "connection": "close"}
    failure = ServerError(message, code="internal_error")
    return error_response(failure, request.scope, headers=headers)


def messages_too_long(overflow: PromptOverflow, tokens: int) -> ContextTooLong:
    return ContextTooLong(
        f"This model's maximum context length is {overflow.context} tokens. However, your messages "
        f"resulted in {tokens} tokens. Please reduce the length of the messages.",
        param="messages",
    )


def prompt_too_long(overflow: PromptOverflow, tokens: int) -> ContextTooLong:
    answer = overflow.request.max_tokens or 0
    return ContextTooLong(
        f"This model's maximum context length is {overflow.context} tokens, however you requested "
        f"{tokens + answer} tokens ({tokens} in your prompt; {answer} for the completion). Please "
        "reduce your prompt.",
        param="prompt",
    )


def input_too_long(overflow: PromptOverflow, tokens: int) -> ContextTooLong:
    return ContextTooLong(
        "Your input exceeds the context window of this model. Please adjust your input and try "
        f"again. This model's maximum context length is {overflow.context} tokens. However, your "
        f"input resulted in {tokens} tokens.",
        param="input",
    )


MESSAGES_PATH = "/v1/messages"
ANTHROPIC_VERSION = "anthropic-version"
"""The header by which Anthropic's clients are known on routes that are also OpenAI's."""

NO_THREADS = "thread_unsupported_request"
"""The code by which Anthropic's tool runner knows that it has to send whole conversations."""

TOO_LONG = "prompt is too long"
"""The words by which agents know that they have to shorten."""

ANTHROPIC_TYPES: Mapping[int, str] = {
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
    is_route = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
    return is_route or ANTHROPIC_VERSION in Headers(scope=scope)


def anthropic_error(error: ServerError, scope: Scope, status: int | None = None) -> dict[str, Any]:
    """The body for one error; `status` overrides the error's own."""
    status = status or error.status
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error.body()["error"]["message"]
    if isinstance(error, ContextTooLong) and TOO_LONG not in message:
        message = f"{TOO_LONG}: {message}"  # as for an upstream, which says so in words of its own
    details = {"details": {"error_code": NO_THREADS}} if error.code == NO_THREADS else {}
    return {
        "type": "error",
        "error": {"type": kind, "message": message, **details},
        "request_id": scope.get("state", {}).get("request_id"),
    }


def anthropic_prompt_too_long(overflow: PromptOverflow, tokens: int) -> ContextTooLong:
    """The overflow in Anthropic's words."""
    most = overflow.context - 1
    return ContextTooLong(f"{TOO_LONG}: {tokens} tokens > {most} maximum", param="messages")


OLLAMA_PREFIX = "/api/"

OLLAMA_REFUSED = frozenset(
    f"{OLLAMA_PREFIX}{name}" for name in ("copy", "create", "delete", "pull", "push")
)
"""Routes that only say why they do nothing."""


def is_ollama(scope: Scope) -> bool:
    path: str = scope.get("path", "")
    return path.startswith(OLLAMA_PREFIX)


def ollama_error(error: ServerError) -> dict[str, Any]:
    return {"error": error.body()["error"]["message"]}


def ollama_prompt_too_long(overflow: PromptOverflow, tokens: int) -> ContextTooLong:
    """The overflow in Ollama's words, by which its clients know that they have to shorten, with the
    numbers that it leaves out."""
    numbers = messages_too_long(overflow, tokens)
    return ContextTooLong(
        "the prompt is longer than the context length currently available to the model. "
        f"{numbers.message}",
        param=numbers.param,
    )
