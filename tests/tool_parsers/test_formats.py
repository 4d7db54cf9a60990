"""Our parsers of call formats and mlx-lm's, where it has one: where they differ, and why.

Each input in mlx_lm.yaml is the text between a call's delimiters. Without a reason both have to
read the same, and with one they have to differ: what a new mlx-lm changes shows here.
"""

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_server.tool_parsers import formats, tag_formats
from mlx_server.tool_parsers.call_format import CallFormat, parse_calls
from mlx_server.tool_parsers.elements import KIMI_K3
from mlx_server.tool_parsers.keyed_calls import GLM
from tests.families.goldens import FOLDER, tools

OURS: dict[str, CallFormat] = {
    "function_gemma": formats.FUNCTION_GEMMA,
    "gemma4": formats.GEMMA4,
    "glm47": GLM,
    "json_tools": formats.HERMES,
    "kimi_k2": formats.KIMI_K2,
    "kimi_k3": KIMI_K3,
    "minimax_m2": tag_formats.MINIMAX_M2,
    "mistral": formats.MISTRAL,
    "pythonic": formats.LFM2,
    "qwen3_coder": tag_formats.QWEN3_CODER,
}


INPUTS = yaml.load(Path(__file__).with_name("mlx_lm.yaml").read_text("utf-8"), yaml.CSafeLoader)
TABLE = [
    (parser, text, reason)
    for parser, inputs in INPUTS.items()
    for text, reason in [*([text, ""] for text in inputs["same"]), *inputs["other"]]
]


def calls_of(parse: Callable[..., Any], text: str, offered: Any) -> str | None:
    """Names and arguments of the calls as JSON, where 1 and 1.0 differ; None where it refuses."""
    try:
        found = parse(text, offered)
    except Exception:  # mlx-lm's raise whatever comes
        return None
    calls = found if isinstance(found, list) else [found]
    return json.dumps([[call["name"], call.get("arguments")] for call in calls], sort_keys=True)


@pytest.mark.slow
@pytest.mark.parametrize(("parser", "text", "reason"), TABLE)
def test_every_difference_has_a_reason(parser: str, text: str, reason: str) -> None:
    theirs = importlib.import_module(f"mlx_lm.tool_parsers.{parser}").parse_tool_call
    offered = yaml.load((FOLDER / "tools.yaml").read_text("utf-8"), yaml.CSafeLoader)
    our_calls = calls_of(partial(parse_calls, OURS[parser]), text, tools())
    their_calls = calls_of(theirs, text, offered)
    assert (our_calls != their_calls) == bool(reason), f"{our_calls} | {their_calls}: {reason}"
