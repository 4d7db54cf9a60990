"""Finds tool calls in JSON that a model wrote instead of its own call format.

Models write the forms of many APIs. Only an object that holds nothing but a call is one: any other
key could carry text that would be lost.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_server.repair.model_json import Malformed, loads, loads_arguments, loads_exactly

NAME_KEYS = ("name", "tool", "tool_name", "function", "function_name", "recipient_name", "action")
ARGUMENT_KEYS = (
    *("arguments", "parameters", "args", "params", "input", "kwargs"),
    *("tool_input", "tool_args", "tool_arguments", "function_args", "action_input"),
)
LIST_KEYS = ("tool_calls", "tool_uses", "function_calls", "calls")
FRAME_KEYS = ("function", "function_call", "tool_call", "call")
"""Keys whose value is the call itself, as an object of its own."""
OTHER_KEYS = ("type", "id", "index", "tool_call_id", "call_id", "role")
"""Keys that say nothing that a call needs."""
EMPTY_KEYS = ("content", "refusal", "thought")
"""Keys that may be there if they hold no text."""

CALL_KEYS = frozenset(
    (*NAME_KEYS, *ARGUMENT_KEYS, *LIST_KEYS, *FRAME_KEYS, *OTHER_KEYS, *EMPTY_KEYS)
)


@dataclass(frozen=True, slots=True)
class FoundCall:
    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    has_mistakes: bool = False
    """Whether the JSON had to be repaired."""


def read_calls(text: str, tools: Collection[str], *, repairs: bool) -> list[FoundCall]:
    """The calls that a JSON value consists of; raises Malformed if it is anything else.

    tools: names that may stand as the only key, in front of the arguments.
    """
    value, has_mistakes = _parsed(text, repairs=repairs)
    try:
        calls = list(_calls(value, tools, repairs=repairs))
    except RecursionError:
        raise Malformed("lists of calls are nested too deeply") from None
    if not calls:
        raise Malformed("there is no call")
    return [FoundCall(c.name, c.arguments, c.id, c.has_mistakes or has_mistakes) for c in calls]


def read_arguments(text: str, *, repairs: bool) -> Mapping[str, Any]:
    value, _ = _parsed(text, repairs=repairs)
    if not isinstance(value, Mapping):
        raise Malformed("arguments should be an object")
    return value


def _parsed(text: str, *, repairs: bool) -> tuple[Any, bool]:
    try:
        return loads_exactly(text), False
    except (ValueError, RecursionError):
        if not repairs:
            raise Malformed("no JSON") from None
        return loads_arguments(text, CALL_KEYS), True


def _calls(value: Any, tools: Collection[str], *, repairs: bool) -> Iterator[FoundCall]:
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, Mapping):
                raise Malformed("a call should be an object")
            yield from _calls(item, tools, repairs=repairs)
    elif isinstance(value, Mapping):
        yield from _calls_of_object(value, tools, repairs=repairs)
    else:
        raise Malformed("a call should be an object")


def _calls_of_object(
    value: Mapping[str, Any], tools: Collection[str], *, repairs: bool
) -> Iterator[FoundCall]:
    said = {key: found for key, found in value.items() if key not in OTHER_KEYS}
    said = {k: found for k, found in said.items() if k not in EMPTY_KEYS or found}
    if len(said) == 1:
        ((key, inside),) = said.items()
        if (key in LIST_KEYS and isinstance(inside, list)) or (
            key in FRAME_KEYS and isinstance(inside, Mapping)
        ):
            yield from (
                FoundCall(c.name, c.arguments, c.id or _id(value), c.has_mistakes)
                for c in _calls(inside, tools, repairs=repairs)
            )
            return
        if key in tools and isinstance(inside, Mapping) and inside:
            yield FoundCall(key, inside, _id(value))
            return
    names = [key for key in said if key in NAME_KEYS]
    arguments = [key for key in said if key in ARGUMENT_KEYS]
    if len(names) != 1 or len(arguments) != 1 or len(said) != 2:
        raise Malformed("a call needs a name and arguments, and nothing else")
    name, found = said[names[0]], said[arguments[0]]
    if not isinstance(name, str) or not name:
        raise Malformed("a call's name should be text")
    has_mistakes = False
    if isinstance(found, str):
        found, has_mistakes = _parsed(found, repairs=repairs)
    if found is None:
        found = {}
    if not isinstance(found, Mapping):
        raise Malformed("arguments should be an object")
    yield FoundCall(name, found, _id(value), has_mistakes)


def _id(value: Mapping[str, Any]) -> str | None:
    found = next((value[key] for key in ("id", "tool_call_id", "call_id") if key in value), None)
    return found if isinstance(found, str) and found else None


WRAPPERS = frozenset((*ARGUMENT_KEYS, "properties"))
"""Words that call formats and schemas have for the arguments as a whole."""


def unwrapped(key: str, value: Any, known: Collection[str]) -> Mapping[str, Any] | None:
    """The arguments that are the value of `key`; None if it is an argument like any other.

    known: the parameters that the tool's schema names, to which all of the arguments must belong.
    """
    if not known or key in known or key not in WRAPPERS:
        return None
    if isinstance(value, str):
        value = _json_of(value)
    return value if isinstance(value, Mapping) and value.keys() <= set(known) else None


def _json_of(text: str) -> Any:
    try:
        return loads(text) if text.lstrip().startswith("{") else None
    except Malformed:
        return None
