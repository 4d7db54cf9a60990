"""Finds the tool calls that a model meant: a slightly wrong name, JSON in the form of another API,
arguments of another type. Nothing is guessed.

Models write the forms of many APIs. Only an object that holds nothing but a call is one: any other
key could carry text that would be lost.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlx_server import limits
from mlx_server.grammars.arguments import lenient_items, lenient_member, types_of_member
from mlx_server.grammars.view import View, type_of, types_of
from mlx_server.tool_parsers.model_json import (
    ExactFloat,
    Malformed,
    loads,
    loads_arguments,
    loads_exactly,
    loads_value,
)

PREFIXES = ("functions.", "functions:", "function.", "tools.", "tool.", "default_api.")
LEAKED = re.compile(r"<\|.*|<｜.*|\[[A-Z_]+\].*", re.DOTALL)
"""Control tokens that leaked into the name, and the text after them."""

SUFFIX = re.compile(r"(\.(json|py)|\(\)|[\s.:]{1,3}(json|code)|:\d+)$")
"""A content type, brackets or a number, written as a part of the name."""


def match_tool_name(written: str, names: Iterable[str]) -> str | None:
    """Returns the matching name; None if no name, or more than one, could be meant."""
    known = list(names)
    if written in known:
        return written
    cleaned = LEAKED.sub("", written).strip().strip("\"'`").strip()
    bare = next((cleaned.removeprefix(p) for p in PREFIXES if cleaned.startswith(p)), cleaned)
    tail = cleaned.rpartition(":")[2]  # after the namespaces of a gateway
    namespaced = bare.rpartition(".")[2] if bare != cleaned else bare  # functions.namespace.name
    half = cleaned[: len(cleaned) // 2]  # a name that was written twice, or as its own namespace
    twice = [half] if cleaned in (half * 2, f"{half}.{half}") else []
    for candidate in (cleaned, bare, tail, *twice, SUFFIX.sub("", bare)):
        if candidate in known:
            return candidate
    folded = _folded(SUFFIX.sub("", bare))
    near = [name for name in known if folded and _folded(name) == folded]
    if not near and namespaced in known and not bare.startswith(PREFIXES):
        return namespaced
    # without its namespace
    near = near or [name for name in known if bare and name.endswith(f"__{bare}")]
    return near[0] if len(near) == 1 else None


def _folded(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()


NAME_KEYS = ("name", "tool", "tool_name", "function", "function_name", "recipient_name", "action")
ARGUMENT_KEYS = (
    *("arguments", "parameters", "args", "params", "input", "kwargs"),
    *("tool_input", "tool_args", "tool_arguments", "function_args", "action_input"),
)
LIST_KEYS = ("tool_calls", "tool_uses", "function_calls", "calls")
FRAME_KEYS = ("function", "function_call", "functionCall", "tool_call", "call")
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
    value, has_mistakes = _parsed_json(text, CALL_KEYS, repairs=repairs)
    calls = calls_of(value, tools, repairs=repairs)
    return [FoundCall(c.name, c.arguments, c.id, c.has_mistakes or has_mistakes) for c in calls]


def calls_of(value: Any, tools: Collection[str], *, repairs: bool) -> list[FoundCall]:
    try:
        calls = list(_calls(value, tools, repairs=repairs))
    except RecursionError:
        raise Malformed("lists of calls are nested too deeply") from None
    if not calls:
        raise Malformed("there is no call")
    return calls


def read_arguments(value: Any, *, repairs: bool) -> tuple[Mapping[str, Any], bool]:
    """Returns the arguments that came at once, which some models write as text again, and whether
    they had mistakes."""
    has_mistakes = value is None
    if value is None and repairs:
        value = {}
    if isinstance(value, str):
        value, has_mistakes = _parsed_json(value, frozenset(), repairs=repairs)
    if not isinstance(value, Mapping):
        raise Malformed("arguments should be an object")
    return value, has_mistakes


def name_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Malformed("a call's name should be text")
    return value


def _parsed_json(text: str, once: Set[str], *, repairs: bool) -> tuple[Any, bool]:
    """once: see `loads_arguments`."""
    try:
        return loads_exactly(text), False
    except (ValueError, RecursionError):
        if not repairs:
            raise Malformed("no JSON") from None
        return loads_arguments(text, once), True


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
    members = {key: v for key, v in value.items() if key not in OTHER_KEYS}
    members = {k: v for k, v in members.items() if k not in EMPTY_KEYS or v}
    if len(members) == 1:
        ((key, inside),) = members.items()
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
    names = [key for key in members if key in NAME_KEYS]
    arguments = [key for key in members if key in ARGUMENT_KEYS]
    if len(names) != 1 or len(arguments) != 1 or len(members) != 2:
        raise Malformed("a call needs a name and arguments, and nothing else")
    name = name_text(members[names[0]])
    inside = members[arguments[0]]
    found, has_mistakes = read_arguments({} if inside is None else inside, repairs=repairs)
    yield FoundCall(name, found, _id(value), has_mistakes)


def _id(value: Mapping[str, Any]) -> str | None:
    call_id = next((value[key] for key in ("id", "tool_call_id", "call_id") if key in value), None)
    return call_id if isinstance(call_id, str) and call_id else None


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


INEXACT = 2**53
"""The least integer from which on a float may differ from the integer that was written."""

BOOLEANS = {"true": True, "false": False}
"""The spellings of a boolean, in any case, where the schema wants one."""

PADDED = re.compile(r"-?0+[1-9]\d{0,17}")
"""An integer that JSON refuses for the zeros before it."""

BEGINNINGS = {"{": "object", "[": "array"}

Schema = Mapping[str, Any]
Mistake = Callable[[], None]
"""Reports a mistake in how a value is written, or raises Malformed."""


def takes_text(schema: Schema, key: str) -> bool:
    """Whether the parameter takes any text unchanged. schema: the schema of all arguments."""
    return types_of_member(schema, key) == {"string"}


def coerced(value: Any, schema: Schema, key: str) -> Any:
    """Converts the value of parameter `key` to a type that its schema allows, if it can."""
    view = View(schema)
    return _coerced(value, lenient_member(schema, key, view), view, limits.COERCED_DEPTH)


def read_as(text: str, schema: Schema, key: str, mistake: Mistake | None = None) -> Any:
    """Reads the value of parameter `key` from a call format without types.

    The text is read as JSON if the schema allows other types than text. mistake: reports a list or
    object with mistakes, which is read where the schema allows no text. Without it, it stays text.
    """
    view = View(schema)
    return _read_as(text, lenient_member(schema, key, view), view, mistake)


def read_tree(tree: Any, schema: Schema, key: str, mistake: Mistake | None = None) -> Any:
    """Applies `read_as` to lists and objects in which every value is such a text."""
    view = View(schema)
    return _read_tree(tree, lenient_member(schema, key, view), view, mistake)


def _read_tree(tree: Any, schema: Schema, view: View, mistake: Mistake | None) -> Any:
    if mistake and isinstance(tree, dict) and len(tree) == 1 and _wants_list(schema, view):
        mistake()
        (tree,) = tree.values()
        tree = tree if isinstance(tree, list) else [tree]
    if tree == "":
        empty: Any = {"array": [], "object": {}}
        types = types_of(schema, view)
        return "" if "string" in types else next((empty[t] for t in empty if t in types), "")
    if isinstance(tree, str):
        return _read_as(tree, schema, view, mistake)
    return _inside(tree, schema, view, lambda each, own: _read_tree(each, own, view, mistake))


def _wants_list(schema: Schema, view: View) -> bool:
    return types_of(schema, view) & {"array", "object"} == {"array"}


def _read_as(text: str, schema: Schema, view: View, mistake: Mistake | None) -> Any:
    types = types_of(schema, view)
    if types == {"string"}:
        return text
    value = text if text.strip() == "None" else _parsed(text)
    if "string" in types and type_of(value) not in types - {"string"}:
        return text  # the schema allows text, but not what the text could be read as
    if mistake and isinstance(value, str) and BEGINNINGS.get(value.lstrip()[:1]) in types:
        with suppress(Malformed):  # what can't be read is text, like any other wrong value
            value = loads_value(value.strip())
            mistake()
    return _coerced(value, schema, view, limits.COERCED_DEPTH)


def _coerced(value: Any, schema: Schema, view: View, depth: int) -> Any:
    if not schema:  # the schema says nothing of the value
        return value
    types = types_of(schema, view)
    if type_of(value) not in types:
        value = _converted(value, types)
    if not depth:
        return value
    return _inside(value, schema, view, lambda each, own: _coerced(each, own, view, depth - 1))


def _converted(value: Any, types: frozenset[str]) -> Any:
    """The value as one of these types; unchanged if there is no unambiguous conversion."""
    match value:
        case str():
            scalar = BOOLEANS.get(value.strip().lower(), value)
            if "boolean" not in types or scalar is value:
                scalar = _parsed(value)
            if "integer" in types and (padded := PADDED.fullmatch(value.strip())):
                return int(padded[0])
            if type_of(scalar) not in types and isinstance(scalar, (float, int)):
                scalar = _converted(scalar, types)
            return scalar if type_of(scalar) in types else value
        case float() if not math.isfinite(value):
            return value
        case float() if "integer" in types and value.is_integer() and abs(value) < INEXACT:
            return int(value)
        case 0 | 1 if "boolean" in types and isinstance(value, int):
            return bool(value)
        case ExactFloat() if "string" in types:
            return value.text
        case bool() | int() if "string" in types:
            return json.dumps(value)
    return value


def _inside(value: Any, schema: Schema, view: View, read: Callable[[Any, Schema], Any]) -> Any:
    """Applies `read` to each member or item, with its own schema."""
    match value:
        case dict():
            return {k: read(v, lenient_member(schema, k, view)) for k, v in value.items()}
        case list():
            each = lenient_items(schema, view)
            return [read(item, each) for item in value]
    return value


def _parsed(text: str) -> Any:
    literals = {"True": True, "False": False, "None": None}
    word = text.strip()
    if word in literals:
        return literals[word]
    try:
        return loads_exactly(word, lambda name: name)
    except (ValueError, RecursionError):
        return text
