"""A stream as a provider sends it, and what should be read of it."""

import json
from dataclasses import dataclass
from typing import Any

from tests.upstream.playing import SSE, Json, Reply

COUNTED: Json = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


LAST: Json = {"choices": [], "usage": COUNTED}


@dataclass(frozen=True)
class Dialect:
    name: str
    lines: tuple[Any, ...]
    """Text is sent as it is; anything else as the data of an event."""
    reasoning: str = ""
    text: str = ""
    calls: tuple[Json, ...] = ()
    finish: str = "stop"
    repairs: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()
    family: str = "gpt_oss"

    @property
    def reply(self) -> Reply:
        sent = [e if isinstance(e, str) else f"data: {json.dumps(e)}\n\n" for e in self.lines]
        return Reply(("".join(sent).encode(),), headers=SSE)

    @property
    def expected(self) -> Json:
        return {
            "reasoning": self.reasoning,
            "text": self.text,
            "calls": list(self.calls),
            "finish": self.finish,
            "repairs": list(self.repairs),
            "unmet": list(self.unmet),
        }


def chunk(finish: str | None = None, said: Json | None = None, **more: Any) -> Json:
    choice = {"index": 0, "delta": said or {}, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion.chunk", "choices": [choice], **more}


def choice(said: Json | None = None, finish: str | None = None, **more: Any) -> Json:
    """A piece with more fields in its choice."""
    return {"choices": [{"index": 0, "delta": said or {}, "finish_reason": finish, **more}]}


def function(name: str, arguments: str, **more: Any) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


DONE = "data: [DONE]\n\n"


THOUGHT: Json = {"extra_content": {"google": {"thought": True}}}


UNKNOWN_END = "finish_reason: the upstream says {!r}, which is no reason that is known here"
