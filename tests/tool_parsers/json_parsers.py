"""Parsers of JSON calls in the frames of three families."""

from collections.abc import Callable
from functools import partial
from typing import Any

from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import parse_calls
from mlx_server.tool_parsers.formats import HERMES, LLAMA_TAGGED, MISTRAL

TOOLS = [Tool("f", None, {"properties": {"a": {"type": "integer"}}}), Tool("g")]

Parse = Callable[..., list[dict[str, Any]]]

hermes, llama, mistral = (partial(parse_calls, form) for form in (HERMES, LLAMA_TAGGED, MISTRAL))

F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'
ARRAY = f"[{F}, {G}]"
BOTH = [("f", {"a": 1}), ("g", {})]


def read(parse: Parse, text: str) -> list[tuple[str, Any]]:
    return [(call["name"], call["arguments"]) for call in parse(text, TOOLS)]
