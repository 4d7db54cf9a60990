"""Finds the tool calls in an upstream's message or delta, whatever names their fields have."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_server.errors import UpstreamFailed
from mlx_server.upstream.lenient_json import decoded
from mlx_server.upstream.usage import whole_number

FIELDS = ("tool_calls", "toolCalls", "tool_call", "function_calls")
NAMES = ("name", "tool_name", "function_name", "toolName", "tool")
ARGUMENTS = (
    *("arguments", "parameters", "args", "input", "tool_input", "tool_args", "arguments_json"),
    *("toolInput", "kwargs"),
)


@dataclass(frozen=True, slots=True)
class CallPiece:
    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_object: bool = False
    """Whether the arguments came as an object, which `arguments` has as JSON."""
    is_misnumbered: bool = False
    """Whether the upstream's JSON has an index that is not an integer."""
    extra_content: Mapping[str, Any] = field(default_factory=dict)
    """The provider's own fields of the call, which must be sent back with it, for example Gemini's
    signature of the thoughts."""


def calls_of(
    said: Mapping[str, Any],
    choice: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
    *,
    are_whole: bool,
) -> Iterator[CallPiece]:
    """Yields the calls of a message or delta, `said`, or next to it in its `choice`.

    parts: the calls among the parts of its content. are_whole: whether each call is complete, so
    that wrong indices do not matter.
    """
    found = next((each[name] for each in (said, choice) for name in FIELDS if each.get(name)), None)
    if not found and isinstance(said.get("function_call"), Mapping):
        found = [{"index": 0, "function": said["function_call"]}]
    calls = [call for call in (*_call_list(found), *parts) if call is not None]
    for position, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise UpstreamFailed("The upstream sent a call that is not an object.")
        piece = _call_piece(call)
        yield replace(piece, index=position) if are_whole else piece


def _call_list(found: Any) -> list[Any]:
    if isinstance(found, str):
        found = _value_of(found)
    if isinstance(found, Mapping):
        is_numbered = bool(found) and all(str(name).isdigit() for name in found)
        return list(found.values()) if is_numbered else [found]
    if not found:
        return []
    if not isinstance(found, list):
        raise UpstreamFailed("The upstream sent `tool_calls` that are not a list.")
    return found


def _value_of(text: str) -> Any:
    """The value of a JSON text; the text itself if it is not JSON."""
    try:
        return decoded(text)
    except (ValueError, RecursionError):
        return text


def _call_piece(call: Mapping[str, Any]) -> CallPiece:
    """Reads a call, whose name and arguments are in its `function` or next to that."""
    inside = call.get("function") or call.get("custom")
    if isinstance(inside, str) and inside.lstrip().startswith("{"):
        inside = _value_of(inside)
    function = inside if isinstance(inside, Mapping) else call
    names = (*map(function.get, NAMES), inside)
    arguments: Any = next((function[key] for key in ARGUMENTS if key in function), "")
    index, id = call.get("index"), call.get("id") or call.get("call_id")
    is_object = isinstance(arguments, Mapping)
    if not isinstance(arguments, str):  # no tool accepts JSON of a type other than an object
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    extra = call.get("extra_content")
    return CallPiece(
        index=whole_number(index),
        extra_content=extra if isinstance(extra, Mapping) else {},
        is_misnumbered=index is not None and type(index) is not int,
        id=id if isinstance(id, str) else "",
        name=next((name for name in names if isinstance(name, str) and name), ""),
        arguments=arguments,
        is_object=is_object,
    )
