"""Turns an upstream's errors into this server's, without secrets; says what is sent again."""

import email.utils
import json
import random
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_server import limits
from mlx_server.errors import (
    BadRequest,
    ContextTooLong,
    ServerError,
    UpstreamBusy,
    UpstreamFailed,
    UpstreamLoop,
)
from mlx_server.json_bounds import json_or_none

RETRIED = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529))
"""Statuses after which the same request may succeed, so that it is sent again."""

BUSY = frozenset((408, 409, 425, 429, 503, 529))

CONTEXT = re.compile(
    r"context.{0,20}(length|window|size|limit)|maximum.{0,20}(tokens|prompt length)"
    r"|too many tokens|\b(prompt|input|messages?) (is|are) too (long|large)|longer than the model's"
    r"|max_model_len|reduce the length of|input length|input tokens.{0,40}exceed"
    r"|token limit exceeded|max_new_tokens\W{1,3}must be|exceed_context",
    re.I,
)
"""Matches other servers' messages for a prompt that is too long."""

KINDS = {
    429: re.compile(r"rate.?limit|too.?many.?requests|quota|resource.?exhausted|throttl", re.I),
    503: re.compile(r"overloaded|unavailable|capacity", re.I),
    400: re.compile(r"invalid.?request|context.?length|exceed.?context|invalid.?argument", re.I),
}
"""Matches the names of errors without a status, by the status that they mean."""

CODES = ("code", "status", "status_code", "type")

MESSAGE_FIELDS = ("error", "errors", "detail", "message")
"""Fields that may have an error's message, or an object with the message: OpenAI's, watsonx's,
FastAPI's, and that of older versions of vLLM."""

NESTING_LEVELS = 5
"""The number of levels of nested objects in which a message is searched."""

SECRETS = re.compile(
    r"(?i:bearer|basic)\s+(?=\S*[\d=._-])\S+"
    r"|(?i:key|token|secret|passw(?:or)?d|authorization|credentials?)[\"'`]?\s*[:=]\s*[\"'`]?[\w./+=-]{6,}"
    r"|\b(?i:account|organi[sz]ation|project|space|tenant|user|deployment|request)"
    r"[_ -]?(?i:id)[\"'`]?[\s:=]\s*\S+"
    r"|\b[ac]rn:\S+"
    r"|(?:\b[A-Za-z]:\\|~/|(?<![\w/.])/(?:home|Users|root|var|usr|opt|etc|tmp|mnt|srv|data|app"
    r"|private|proc|run|workspace|Volumes|models)/)[^\s\"'`]*"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\[[0-9a-fA-F:]{3,}\](?::\d+)?"
    r"|(?<![\w.-])[\w-]*(?:\.[\w-]*)+:\d{2,5}\b"
    r"|\b\d{9,}\b"
    r"|\b(?:AIza|xox[a-z]-|glpat-|r8_)[\w-]{6,}"
    r"|\b(?=\w*\d)(?=\w*[A-Za-z])[A-Za-z0-9]{20,}\b"
    r"|\b(?:sk|pk|rk|hf|gsk|xai|nvapi|key|tok|org|proj|user|acct|asst|req|key_id)[-_][\w*.-]{6,}"
    r"|(?<![\w.+-])[\w.+-]*(?:://\S+|@[\w-]+\.[\w.]+)"
    r"|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
    r"|\b(?=\w*\d)(?=\w*[A-Za-z])\w{28,}\b"
    r"|\beyJ[\w.-]+"
)
"""Matches texts that may be a credential or identify an account or a machine: keys, ids, addresses,
paths."""

QUOTED_CHARACTERS = 500


def refusal(model: str, status: int, body: bytes, secrets: Iterable[str] = ()) -> ServerError:
    """The error for a response with a status other than 200.

    secrets: texts that its message must not show.
    """
    message = message_of(body, secrets)
    names = b" ".join(re.findall(rb'"(?:code|type)": ?"(\w{1,60})"', body[:QUOTED_CHARACTERS]))
    quoted = f": {message}" if message else "."
    if status in (400, 413, 422):
        if CONTEXT.search(message) or CONTEXT.search(names.decode()):
            return ContextTooLong(f"The upstream of {model} refused the request{quoted}")
        return BadRequest(f"The upstream of {model} refused the request{quoted}")
    if status in (401, 403):
        return UpstreamFailed(
            f"The upstream of {model} refused this server's key with status {status}. Check "
            "`api_key_env` in models.yaml and the account's rights."
        )
    if status == 402:
        return UpstreamFailed(
            f"The upstream of {model} asks for payment (status 402). Check the account's credit."
        )
    if status == 404:
        return UpstreamFailed(
            f"The upstream of {model} does not know the model or the route (status 404). Check "
            "`source` and `upstream_model` in models.yaml."
        )
    if 300 <= status < 400:
        return UpstreamFailed(
            f"The upstream of {model} answered with a redirect (status {status}), which is not "
            "followed. Name the right URL as `source` in models.yaml."
        )
    if status == UpstreamLoop.status:
        return UpstreamLoop(f"The upstream of {model} reports a loop of servers{quoted}")
    if status in BUSY:
        return UpstreamBusy(f"The upstream of {model} is busy (status {status}){quoted}")
    return UpstreamFailed(f"The upstream of {model} failed with status {status}{quoted}")


def reported(model: str, error: object, secrets: Iterable[str] = ()) -> ServerError:
    """The error for a response with status 200 whose body reports an error."""
    entry = error if isinstance(error, Mapping) else {"message": error}
    body = json.dumps({"error": entry}, default=str).encode()
    return refusal(model, _status(entry), body, secrets)


def _status(error: Mapping[str, Any]) -> int:
    """The HTTP status that an error's codes mean; 500 if they show none."""
    fields = map(error.get, MESSAGE_FIELDS)
    inner = next((each for each in fields if isinstance(each, Mapping)), {})
    codes = [place[name] for place in (error, inner) for name in CODES if name in place]
    if status := next((n for n in codes if type(n) is int and 400 <= n < 600), None):
        return status
    names = " ".join(code for code in codes if isinstance(code, str))
    return next((status for status, kind in KINDS.items() if kind.search(names)), 500)


def error_in(value: Mapping[str, Any]) -> object:
    """The error in a body or an event that reports one; None for an answer. OpenRouter's is in a
    choice, or next to the choices, once the answer has begun."""
    if _is_error(error := value.get("error")):
        return error
    match value.get("choices"):
        case [{"error": error}, *_] if _is_error(error):
            return error
    is_answer = "choices" in value
    return None if is_answer or not any(map(value.get, MESSAGE_FIELDS)) else value


def _is_error(error: object) -> bool:
    """Whether the field has an error. OpenRouter and others may send it with empty values."""
    return any(error.values()) if isinstance(error, Mapping) else bool(error)


def message_of(body: bytes, secrets: Iterable[str] = ()) -> str:
    """The message in an error's body, without secrets; empty if it has none."""
    reply = json_or_none(body[: limits.UPSTREAM_ERROR_BYTES])
    return "" if isinstance(reply, str) else redacted(_words(reply), secrets)


def _words(reply: Any) -> str:
    for _ in range(NESTING_LEVELS):
        match reply:
            case {"message": str(message), "metadata": {"raw": str(raw)}}:
                return f"{message}: {_words(raw)}"  # OpenRouter passes on the provider's words
            case Mapping():
                reply = next(filter(None, map(reply.get, MESSAGE_FIELDS)), None)
            case [first, *_]:
                reply = first
            case str() if reply.startswith("{"):  # another server's error
                try:
                    reply = json.loads(reply)
                except (ValueError, RecursionError):
                    break
            case _:
                break
    return str(reply) if isinstance(reply, str) else ""


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    for secret in secrets:
        if secret:
            text = text.replace(secret, "[redacted]")
    cleaned = "".join(sign if sign.isprintable() else " " for sign in text[: 8 * QUOTED_CHARACTERS])
    return SECRETS.sub("[redacted]", cleaned)[:QUOTED_CHARACTERS].strip()


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds to wait in the `Retry-After` header; None if it has none."""
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,3})?", text):
        return float(text)
    try:
        at = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return max(0.0, at.timestamp() - time.time())


FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
"""The first and the longest pause before a request is sent again, in seconds. It doubles each time,
and up to half of it is left out at random."""


class Retriable(Exception):
    """The request may be sent again. `error` is reported if it is not."""

    def __init__(self, error: ServerError, pause: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.pause = pause
        """The seconds to wait that the upstream asks for, if any."""


class Unreachable(Retriable):
    """No connection was made, so it can't be due to the request."""


def pause_before(attempt: int, failure: Retriable) -> float | None:
    """The seconds before the next attempt; None if the upstream asks for more than the limit."""
    backoff = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE)
    jittered = backoff * random.uniform(0.5, 1.0)  # noqa: S311 - it keeps no secret
    asked = failure.pause or 0.0
    return None if asked > limits.UPSTREAM_PAUSE_SECONDS else max(asked, jittered)
