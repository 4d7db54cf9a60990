"""Reads the arguments of one call in pieces."""

from typing import Any

import pytest

from mlx_server.events import Event, ToolCallDelta
from mlx_server.messages import Tool
from mlx_server.tool_parsers import values as reader
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.model_json import Malformed
from mlx_server.tool_parsers.source import Source, Steps
from mlx_server.tool_parsers.values import JSON, python_syntax

TYPED = {"type": "object", "properties": {"s": {"type": "string"}, "t": {"type": "string"}}}
"""Values of `s` and `t` stream."""

PYTHON = python_syntax()


def read(pieces: list[str], schema: Any = TYPED) -> list[Event]:
    """The arguments of one call, from the opening brace on."""
    events: list[Event] = []
    calls = ToolCallEmitter(0, [Tool("f", parameters=schema)], events.append)
    source = Source()

    def steps() -> Steps[None]:
        call = calls.start("f")
        yield from source.space()
        yield from source.expect("{")
        yield from reader.arguments(source, JSON, lambda: call)
        call.finish()
        assert not (yield from source.space()).strip()
        if (yield from source.peek()):
            raise Malformed("more than an object")

    reading = steps()
    for piece in pieces:
        source.feed(piece)
        next(reading, None)
    source.close(cut=False)
    for _ in reading:
        pytest.fail("a closed source has nothing to wait for")
    return events


def arguments(events: list[Event]) -> str:
    return "".join(e.arguments for e in events if isinstance(e, ToolCallDelta))
