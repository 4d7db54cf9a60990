"""Plays tokens or text to a parser of gpt-oss's answers."""

import json
from typing import Any

from hypothesis import strategies as st

from mlx_server.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.messages import Tool
from mlx_server.parsers.harmony_parser import HarmonyParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.prompts.harmony.vocabulary import encoding

TOOLS = (
    Tool("get_time", None, {}),
    Tool("note", None, {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}),
)


def ids(text: str) -> list[int]:
    found: list[int] = encoding().encode(text, allowed_special="all")
    return found


def parser(tools: tuple[Tool, ...] = TOOLS) -> HarmonyParser:
    return HarmonyParser(encoding(), ParseContext(tools=tools))


def played(tokens: list[int], tools: tuple[Tool, ...] = TOOLS, *, cut: bool = False) -> list[Event]:
    reading = parser(tools)
    events = [event for token in tokens for event in reading.feed(token, "")]
    return events + reading.finish(cut=cut)


def heard(output: str, tools: tuple[Tool, ...] = TOOLS, *, cut: bool = False) -> list[Any]:
    """Text as it is, reasoning and calls marked, neighbours joined."""
    return content_of(played(ids(output), tools, cut=cut))


def content_of(events: list[Event]) -> list[Any]:
    found: list[Any] = []
    for event in events:
        match event:
            case TextDelta():
                _joined(found, "text", event.separated)
            case ReasoningDelta():
                _joined(found, "reasoning", event.separated)
            case ToolCallStarted(name=name):
                found.append(["call", name, ""])
            case ToolCallDelta(arguments=piece):
                found[-1][2] += piece
            case ToolCallFinished():
                found[-1][2] = json.loads(found[-1][2])
    return found


def _joined(found: list[Any], kind: str, text: str) -> None:
    if found and found[-1][0] == kind:
        found[-1][1] += text
    else:
        found.append([kind, text])


CALL = "<|channel|>commentary to=functions.note <|constrain|>json<|message|>"


PYTHON, BROWSER = Tool("python"), Tool("browser")


PIECES = st.sampled_from(
    [
        "assistant",
        "user",
        "analysis",
        "commentary",
        "final",
        " to=functions.note",
        " to=functions.other",
        " to=python",
        "to=",
        " json",
        " ",
        "\n",
        '{"text": "',
        '"}',
        "{",
        "}",
        "Hello 🗼",
        CALL,
        "<|channel|>final<|message|>",
        "<|end|><|start|>assistant",
    ]
)
