"""Writes a schema as llguidance gets it: without unsupported keywords, and with references as JSON
pointers."""

import json
from typing import Any

from mlx_server.schemas import patterns
from mlx_server.schemas.bounds import wide_bound
from mlx_server.schemas.property_names import list_names, listed_names, match_names, names_pattern
from mlx_server.schemas.report import COUNTS, IDLE, is_closed, is_vacuous, unsupported_keywords
from mlx_server.schemas.view import Path, Schema, View, reference

SPACE = r"\x20|\n(\x20{0,40}|\x09{0,10})"
"""The white space between the parts of JSON. It is bounded, because a small model may otherwise
write blanks until it reaches its token limit."""

JSON = {"whitespace_pattern": SPACE, "coerce_one_of": True}
"""llguidance's options. It reads `oneOf` as `anyOf`; the report names those that may overlap."""

ESCAPES = 'nrbtf\\"'


def text_of(schema: Schema) -> str:
    """The body of a rule in llguidance's Lark that matches JSON which conforms to the schema."""
    enforced = simplified(schema)
    if enforced is False:
        return "%json false"
    members = enforced if isinstance(enforced, dict) else {}
    # with \\u, the model could spell the name of a listed property so that it escapes its schema
    escapes = {"json_allowed_escapes": ESCAPES if _may_spell(enforced) else ESCAPES + "u"}
    return f"%json {json.dumps({**members, 'x-guidance': JSON | escapes})}"


def simplified(schema: Schema) -> dict[str, Any] | bool:
    """The schema with pointers only, without unsupported keywords and those that constrain nothing.

    Every `oneOf` stays where it is, because references may point into it.
    """
    if isinstance(schema, bool):
        return schema
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    copy.pop("x-guidance", None)
    view = View(copy)
    dropped: dict[Path, set[str]] = {}
    for unsupported in unsupported_keywords(view):
        dropped.setdefault(unsupported.path, set()).add(unsupported.keyword)
    parts = [
        (part, view.target(part), listed_names(view, part), names_pattern(view, part))
        for part in view.reached()
    ]
    for part, target, names, pattern in parts:
        path, found = part
        if isinstance(found, dict):
            if names is not None:
                list_names(found, part, names)
            if pattern is not None:
                match_names(found, pattern)
            _simplify(found, dropped.get(path, set()))
            if target:
                found["$ref"] = reference(target.path)
    return copy


def _simplify(schema: dict[str, Any], dropped: set[str]) -> None:
    idle = {key for key in schema if key in IDLE or is_vacuous(schema, key)}
    for key in dropped | idle:
        schema.pop(key, None)
    for key in schema.keys() & set(COUNTS):
        schema[key] = int(schema[key])
    wide = {key: wide_bound(schema, key) for key in schema}
    schema.update({key: bound for key, bound in wide.items() if bound is not None})
    if "pattern" in schema:
        schema["pattern"] = patterns.as_rust(schema["pattern"])


def _may_spell(schema: Schema) -> bool:
    """Whether an object with listed properties also allows members of any other name."""
    named = ("properties", "required", "patternProperties")
    return any(
        isinstance(found, dict) and any(found.get(key) for key in named) and not is_closed(found)
        for _, found in View(schema).reached()
    )
