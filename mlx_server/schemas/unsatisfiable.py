"""Finds the part of a schema to which no value conforms.

llguidance names only the outermost member or item that is required and can't be met. By itself each
part inside it is refused for its own reason, down to the one that has no such part.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_server.errors import InvalidGrammar
from mlx_server.schemas.compiler import fault
from mlx_server.schemas.view import DEFINITIONS, Part, View, refused

MOST_STEPS = 32
"""The most parts within each other that are tried, and schemas that are joined to one."""

_UNSATISFIABLE = "Unsatisfiable schema: "
_MEMBER = "required property '"
_MEMBER_END = "' is unsatisfiable"
_ITEM = re.compile(r"required item is unsatisfiable|prefixItems\[(\d+)\] is unsatisfiable")
_DEFINITION = re.compile(r" while processing (#\S*)$")
_TEXT = re.compile(r"Regex is empty: .*", re.DOTALL)


def refusal_of(why: str, view: View) -> InvalidGrammar | None:
    """Returns the error that names the innermost part; None if llguidance refuses the schema for
    another reason. why: its message."""
    if _UNSATISFIABLE not in why:
        return None
    part = Part((), view.root)
    for _ in range(MOST_STEPS):
        if definition := _DEFINITION.search(why):
            why = why[: definition.start()]
            part = view.target(Part((), {"$ref": definition[1]})) or part
        inner = next(_required(why, part, view), None)
        if inner is None:
            break
        part = inner
        inside = _fault(part.schema, view.root)
        if _UNSATISFIABLE not in inside:  # it can't be met only together with others
            break
        why = inside
    reason = why.rpartition(_UNSATISFIABLE)[2]
    reason = _TEXT.sub("no text has its pattern, format and length", reason)
    return refused(part.path, f"can't be met by any value: {reason}")


def _required(why: str, part: Part, view: View) -> Iterator[Part]:
    """Yields the schemas of the member or of the item that can't be met."""
    name, is_member, _ = why.partition(_MEMBER)[2].rpartition(_MEMBER_END)
    if is_member:
        steps: tuple[str, ...] = ("properties", name)
    elif item := _ITEM.search(why):
        steps = ("prefixItems", item[1]) if item[1] else ("items",)
    else:
        return
    for joined in _joined(part, view):
        for inner in view.links(joined).used:
            if inner.path[len(joined.path) :] == steps:
                yield inner


def _joined(part: Part, view: View) -> Iterator[Part]:
    """Yields the part, the target of its `$ref` and the schemas of its `allOf`, and theirs in
    turn."""
    waiting = [part]
    for _ in range(MOST_STEPS):
        if not waiting:
            return
        part = waiting.pop()
        yield part
        links = view.links(part)
        waiting += [each for each in links.used if each.path[len(part.path)] == "allOf"]
        waiting += [links.target] if links.target else []


def _fault(schema: Any, root: Any) -> str:
    if isinstance(schema, Mapping):
        definitions = {key: root[key] for key in DEFINITIONS if key in root}
        schema = {**schema, **definitions, "x-guidance": {"coerce_one_of": True}}
    return fault(f"start: %json {json.dumps(schema)}", reads_only=True)
