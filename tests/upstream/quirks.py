"""Answers that are not as they should be, read alike by every endpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.upstream.playing import (
    USAGE,
    AnswerReader,
    Json,
    PlayingServer,
    Reply,
    as_message,
    as_response,
    delta,
    in_chunks,
    in_one,
    streamed,
)

WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME: Json = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
NOW: Json = {"name": "get_time", "arguments": {}}
PARIS = {"name": "get_weather", "arguments": {"city": "Paris"}}
ROME = {"name": "get_weather", "arguments": {"city": "Rome"}}
PARIS_JSON = '{"city": "Paris"}'
CALL_JSON = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@dataclass(frozen=True)
class Quirk:
    name: str
    deltas: tuple[Any, ...]
    reasoning: str = ""
    text: str = ""
    calls: tuple[Json, ...] = ()
    finish: str = "stop"
    repairs: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()
    family: str = "gpt_oss"
    ends: Json = field(default_factory=lambda: delta("stop"))

    @property
    def reply(self) -> Reply:
        values = [each if "choices" in each else delta(**each) for each in self.deltas]
        return streamed(*values, self.ends, USAGE)

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


def call(arguments: Any, name: str = "get_weather", **more: Any) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": 0, "id": "call_1", "function": function, **more}]}


def indexed(index: Any, id: str | None = None, **function: Any) -> Json:
    """A piece of a call."""
    return {"tool_calls": [{"index": index, "id": id, "function": function}]}


def calls(*made: Json, **more: Any) -> Json:
    return {"calls": made, "finish": "tool_calls", **more}


FAMILIES = ("gpt_oss", "plain", "qwen3")

READERS = (in_one, in_chunks, as_response, as_message)


def reads(*quirks: Quirk) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of each quirk, as each endpoint has it."""

    def marked(test: Callable[..., None]) -> Callable[..., None]:
        by_quirk = pytest.mark.parametrize("quirk", quirks, ids=lambda quirk: quirk.name)
        by_reader = pytest.mark.parametrize("read_answer", READERS)
        marked_test: Callable[..., None] = by_quirk(by_reader(test))
        return marked_test

    return marked


def check(
    quirk: Quirk,
    read_answer: AnswerReader,
    clients: Mapping[str, TestClient],
    server: PlayingServer,
) -> None:
    server.plays(quirk.reply)
    found = read_answer(clients[quirk.family], {"tools": [WEATHER, TIME]})
    expected = quirk.expected
    if read_answer is as_message:  # the Messages API reports neither repairs nor violations
        expected = {key: expected[key] for key in found}
    assert found == expected
