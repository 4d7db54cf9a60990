"""Renders earlier calls as the model would write them, for templates that leave them out."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from mlx_server.messages import ToolCall
from mlx_server.prompts.message_normalization import arguments_object

Escape = Callable[[Any], Any]
"""Marks a client's text so that it makes no control token; see ControlTokenGuard."""

WriteCalls = Callable[[Sequence[ToolCall], Escape], str]


def in_hermes_tags(calls: Sequence[ToolCall], escaped: Escape) -> str:
    return "\n".join(f"<tool_call>\n{_call_in_json(call, escaped)}\n</tool_call>" for call in calls)


def as_json_array(begin: str, end: str = "") -> WriteCalls:
    def render(calls: Sequence[ToolCall], escaped: Escape) -> str:
        return f"{begin}[{', '.join(_call_in_json(call, escaped) for call in calls)}]{end}"

    return render


def as_python_list(begin: str, end: str) -> WriteCalls:
    def render(calls: Sequence[ToolCall], escaped: Escape) -> str:
        return f"{begin}[{', '.join(escaped(_call_in_python(call)) for call in calls)}]{end}"

    return render


def _call_in_json(call: ToolCall, escaped: Escape) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{{"name": {escaped(name)}, "arguments": {escaped(call.arguments)}}}'


def _call_in_python(call: ToolCall) -> str:
    arguments = arguments_object(call.arguments)
    if not isinstance(arguments, dict):
        return f"{call.name}({call.arguments})"
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
