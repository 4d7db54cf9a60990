"""A server of recorded answers on loopback, which keeps the requests that it got."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from tests.hostile.upstreams import RawServer, http_answer, key_of

Wire = dict[str, Any]

Recorded = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A body or, as a list, the chunks of a stream."""


class RecordedServer(RawServer):
    """Answers in turn."""

    def __init__(self, answers: Sequence[Recorded]) -> None:
        self.answers = [*answers]
        self.requests: list[Wire] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.models: Any = None
        """What it answers to GET /models; None: nothing is there."""
        self.lists = 0
        """How often it was asked for that."""
        super().__init__(tuple)

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    def reply(self, head: str, body: bytes) -> Iterable[bytes]:
        if head.startswith("GET"):
            self.lists += 1
            text = self.models if isinstance(self.models, str) else json.dumps(self.models)
            return (http_answer(text, 400 if self.models is None else 200),)
        self.requests.append(json.loads(body))
        self.paths.append(head.split()[1])
        self.keys.append(key_of(head))
        answer = self.answers.pop(0)
        if isinstance(answer, Mapping):
            return (http_answer(json.dumps(answer), 400 if answer.get("error") else 200),)
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in answer]
        return (http_answer("".join([*lines, "data: [DONE]\n\n"]), kind="text/event-stream"),)


@contextmanager
def recorded(*answers: Recorded) -> Iterator[RecordedServer]:
    """Fails if an answer is left."""
    with closing(RecordedServer(answers)) as server:
        yield server
    assert server.answers == [], "these answers were not asked for"


def completion(content: str | None = "", *, reason: str = "stop", **message: Any) -> Wire:
    said = {"role": "assistant", "content": content, **message}
    choice = {"index": 0, "message": said, "finish_reason": reason}
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    return {"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": usage}


def chunks(*deltas: Wire, reason: str = "stop") -> list[Wire]:
    made: list[Wire] = [{"index": 0, "delta": d, "finish_reason": None} for d in deltas]
    made.append({"index": 0, "delta": {}, "finish_reason": reason})
    return [{"id": "chatcmpl-1", "model": "m", "choices": [choice]} for choice in made]


def call(name: str, arguments: Any, id: str = "call_1") -> Wire:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER: Wire = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
