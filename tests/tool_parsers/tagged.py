"""Parsers of the call formats in tags."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mlx_server.messages import Tool
from mlx_server.tool_parsers.call_format import parse_calls
from mlx_server.tool_parsers.tag_formats import DSML_FORMATS, MINIMAX_M2, QWEN3_CODER, SEED_OSS

PROPERTIES = {
    "path": {"type": "string"},
    "content": {"type": "string"},
    "count": {"type": "integer"},
    "label": {"type": ["string", "null"]},
}
TOOLS = [Tool("write", None, {"properties": PROPERTIES}), Tool("now")]

Parse = Callable[..., list[dict[str, Any]]]

parse_qwen3_coder = partial(parse_calls, QWEN3_CODER)
parse_seed_oss = partial(parse_calls, SEED_OSS)
parse_minimax_m2 = partial(parse_calls, MINIMAX_M2)


def parse_dsml(text: str, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Of whichever version; what stands between the delimiters is not always enough to tell."""
    for notation in DSML_FORMATS:
        with suppress(ValueError):
            return parse_calls(notation, text, tools)
    raise ValueError("there is no call")


def only(calls: list[dict[str, Any]]) -> Any:
    (call,) = calls
    return call["arguments"]
