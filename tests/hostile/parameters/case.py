"""What shows that a parameter is honoured: an answer with it is unlike one without."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NATIVE, RESPONSES = "/generate", "/v1/responses"
CONVERSATIONS, MESSAGES = "/v1/conversations", "/v1/messages"

REPORTED, SAID = "reported", "said"
"""Random weights, and all that its prompt says; a replay model that thinks and calls."""
DEAF = "deaf"
"""Random weights, and a template without a place for tools."""
ADAPTER = "odd"
THINKS, CALLS = "Think.", "Call."
A = 67
"""The id of `a` in the vocabulary of the one with random weights; `b` follows."""

HI: Json = {"role": "user", "content": "Hi"}
SHORTEST: Mapping[str, Json] = {
    CHAT: {"model": REPORTED, "messages": [HI], "max_tokens": 8, "temperature": 0},
    COMPLETIONS: {"model": REPORTED, "prompt": "Hi", "max_tokens": 8, "temperature": 0},
    NATIVE: {"model": REPORTED, "messages": [HI], "max_response_tokens": 8, "temperature": 0},
    RESPONSES: {
        "model": REPORTED,
        "input": "Hi",
        "max_output_tokens": 8,
        "temperature": 0,
        "store": False,
    },
    CONVERSATIONS: {},
    MESSAGES: {"model": REPORTED, "messages": [HI], "max_tokens": 8, "temperature": 0},
}


@dataclass(frozen=True)
class Reply:
    status: int
    kind: str
    ignored: str | None
    body: Any
    """Parsed; of a stream, its events."""


NEVER_THE_SAME = {
    *("id", "created", "created_at", "completed_at", "call_id", "cached_tokens"),
    *("encrypted_content", "item_id", "response_id", "request_id"),
    *("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
}
ECHO = {"output", "usage", "status", "incomplete_details", "error"}
"""Fields of a response that do not repeat the request."""


def whole(reply: Reply) -> Any:
    return reply.status, reply.kind, reply.ignored, _bare(reply.body)


def said(reply: Reply) -> Any:
    is_response = isinstance(reply.body, dict) and reply.body.get("object") == "response"
    if not is_response:
        return whole(reply)
    reported = {name: value for name, value in reply.body.items() if name in ECHO}
    return reply.status, reply.kind, reply.ignored, _bare(reported)


def _bare(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _bare(value) for name, value in node.items() if name not in NEVER_THE_SAME}
    return [_bare(value) for value in node] if isinstance(node, list) else node


@dataclass(frozen=True)
class Case:
    given: Json
    base: Json = field(default_factory=dict)
    status: int = 200
    """Of the answer with the parameter."""
    before: int = 200
    """And without it."""
    sees: Callable[[Reply], Any] = said


def refused(given: Json, **base: Any) -> Case:
    return Case(given, base, status=400)


Shown = Case | str
"""A text is the id of a test elsewhere that shows it."""
