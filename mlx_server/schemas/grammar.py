"""A schema as llguidance gets it: without what is not enforced, references as pointers."""

import json
from typing import Any

from mlx_server.schemas import patterns
from mlx_server.schemas.report import COUNTS, IDLE, is_closed, is_vacuous, unsupported_keywords
from mlx_server.schemas.view import Path, Schema, View, reference

SPACE = r"\x20|\n(\x20{0,40}|\x09{0,10})"
"""Between the parts of JSON. Bounded, or a small model writes blanks until its limit."""

JSON = {"whitespace_pattern": SPACE, "coerce_one_of": True}
"""`oneOf` is read as `anyOf`: where its options may overlap, the report names it."""

ESCAPES = 'nrbtf\\"'


def text_of(schema: Schema) -> str:
    """JSON that follows the schema, as a rule's body in llguidance's Lark."""
    enforced = simplified(schema)
    if enforced is False:
        return "%json false"
    members = enforced if isinstance(enforced, dict) else {}
    # with \\u, a name that `properties` lists could be spelled so, and escape its schema
    escapes = {"json_allowed_escapes": ESCAPES if _may_spell(enforced) else ESCAPES + "u"}
    return f"%json {json.dumps({**members, 'x-guidance': JSON | escapes})}"


def simplified(schema: Schema) -> dict[str, Any] | bool:
    """With pointers only, without the gaps and what constrains nothing.

    `oneOf` stays where references may point into it.
    """
    if isinstance(schema, bool):
        return schema
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    copy.pop("x-guidance", None)
    view = View(copy)
    dropped: dict[Path, set[str]] = {}
    for gap in unsupported_keywords(view):
        dropped.setdefault(gap.path, set()).add(gap.keyword)
    parts = [(part, view.target(part)) for part in view.reached()]
    for (path, found), target in parts:
        if isinstance(found, dict):
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
    if "pattern" in schema:
        schema["pattern"] = patterns.as_rust(schema["pattern"])


def _may_spell(schema: Schema) -> bool:
    """Whether a member may have any name next to those that have a schema of their own."""
    named = ("properties", "required", "patternProperties")
    return any(
        isinstance(found, dict) and any(found.get(key) for key in named) and not is_closed(found)
        for _, found in View(schema).reached()
    )
