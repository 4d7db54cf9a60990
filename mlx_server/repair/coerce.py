"""Converts arguments to the types of the tool's schema, where nothing has to be guessed."""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from mlx_server import limits
from mlx_server.repair.model_json import ExactFloat, loads_exactly, loads_value
from mlx_server.schemas.lenient import items, member, types_of_member
from mlx_server.schemas.types import type_of, types_of
from mlx_server.schemas.view import View

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
    return _coerced(value, member(schema, key, view), view, limits.COERCED_DEPTH)


def read_as(text: str, schema: Schema, key: str, mistake: Mistake | None = None) -> Any:
    """Reads the value of parameter `key` from a call format without types.

    The text is read as JSON if the schema allows other types than text. mistake: reports a list or
    object with mistakes, which is read where the schema allows no text. Without it, it stays text.
    """
    view = View(schema)
    return _read_as(text, member(schema, key, view), view, mistake)


def read_tree(tree: Any, schema: Schema, key: str, mistake: Mistake | None = None) -> Any:
    """Applies `read_as` to lists and objects in which every value is such a text."""
    view = View(schema)
    return _read_tree(tree, member(schema, key, view), view, mistake)


def _read_tree(tree: Any, wanted: Schema, view: View, mistake: Mistake | None) -> Any:
    if mistake and isinstance(tree, dict) and len(tree) == 1 and _wants_list(wanted, view):
        mistake()
        (tree,) = tree.values()
        tree = tree if isinstance(tree, list) else [tree]
    match tree:
        case dict():
            return {
                k: _read_tree(v, member(wanted, k, view), view, mistake) for k, v in tree.items()
            }
        case list():
            each = items(wanted, view)
            return [_read_tree(item, each, view, mistake) for item in tree]
        case "":
            empty: Any = {"array": [], "object": {}}
            types = types_of(wanted, view)
            return "" if "string" in types else next((empty[t] for t in empty if t in types), "")
    return _read_as(tree, wanted, view, mistake)


def _wants_list(wanted: Schema, view: View) -> bool:
    return types_of(wanted, view) & {"array", "object"} == {"array"}


def _read_as(text: str, wanted: Schema, view: View, mistake: Mistake | None) -> Any:
    types = types_of(wanted, view)
    if types == {"string"}:
        return text
    value = text if text.strip() == "None" else _parsed(text)
    if "string" in types and type_of(value) not in types - {"string"}:
        return text  # the schema allows text, but not what the text could be read as
    if mistake and isinstance(value, str) and BEGINNINGS.get(value.lstrip()[:1]) in types:
        mistake()
        value = loads_value(value.strip())
    return _coerced(value, wanted, view, limits.COERCED_DEPTH)


def _coerced(value: Any, wanted: Schema, view: View, depth: int) -> Any:
    if not wanted:  # the schema says nothing of the value
        return value
    types = types_of(wanted, view)
    if type_of(value) not in types:
        value = _converted(value, types)
    return _inside(value, wanted, view, depth - 1) if depth else value


def _converted(value: Any, types: frozenset[str]) -> Any:
    """The value as one of these types; unchanged if there is no unambiguous conversion."""
    match value:
        case str():
            found = BOOLEANS.get(value.strip().lower(), value)
            if "boolean" not in types or found is value:
                found = _parsed(value)
            if "integer" in types and (padded := PADDED.fullmatch(value.strip())):
                return int(padded[0])
            if type_of(found) not in types and isinstance(found, float):
                found = _converted(found, types)
            return found if type_of(found) in types else value
        case float() if not math.isfinite(value):
            return value
        case float() if "integer" in types and value.is_integer() and abs(value) < INEXACT:
            return int(value)
        case ExactFloat() if "string" in types:
            return value.text
        case bool() | int() if "string" in types:
            return json.dumps(value)
    return value


def _inside(value: Any, wanted: Schema, view: View, depth: int) -> Any:
    match value:
        case dict():
            return {k: _coerced(v, member(wanted, k, view), view, depth) for k, v in value.items()}
        case list():
            each = items(wanted, view)
            return [_coerced(item, each, view, depth) for item in value]
    return value


def _parsed(text: str) -> Any:
    literals = {"True": True, "False": False, "None": None}
    word = text.strip()
    if word in literals:
        return literals[word]
    try:
        found = loads_exactly(word, lambda name: name)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(found, float) and not math.isfinite(found) else found
