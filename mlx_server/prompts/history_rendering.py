"""Earlier calls as the text that a model would write, for templates that leave them out."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from mlx_server.messages import ToolCall
from mlx_server.prompts.message_normalization import value_of

Close = Callable[[Any], Any]
"""Marks what a client wrote, so that it makes no control token; see Seal."""

WriteCalls = Callable[[Sequence[ToolCall], Close], str]


def in_hermes_tags(calls: Sequence[ToolCall], closed: Close) -> str:
    return "\n".join(f"<tool_call>\n{_json(call, closed)}\n</tool_call>" for call in calls)


def as_json_array(begin: str, end: str = "") -> WriteCalls:
    def written(calls: Sequence[ToolCall], closed: Close) -> str:
        return f"{begin}[{', '.join(_json(call, closed) for call in calls)}]{end}"

    return written


def as_python_list(begin: str, end: str) -> WriteCalls:
    def written(calls: Sequence[ToolCall], closed: Close) -> str:
        return f"{begin}[{', '.join(closed(_python(call)) for call in calls)}]{end}"

    return written


def _json(call: ToolCall, closed: Close) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{{"name": {closed(name)}, "arguments": {closed(call.arguments)}}}'


def _python(call: ToolCall) -> str:
    arguments = value_of(call.arguments)
    if not isinstance(arguments, dict):
        return f"{call.name}({call.arguments})"
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
