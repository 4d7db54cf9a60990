"""Writes a schema as llguidance gets it: without unsupported keywords, and with references as JSON
pointers."""

import json
from collections.abc import Iterable
from typing import Any

from mlx_server.schemas import patterns
from mlx_server.schemas.bounds import wide_bound
from mlx_server.schemas.property_names import list_names, listed_names, match_names, names_pattern
from mlx_server.schemas.report import (
    COUNTS,
    DROPPABLE,
    IDLE,
    UnsupportedKeyword,
    is_closed,
    is_vacuous,
    unsupported_keywords,
)
from mlx_server.schemas.view import HOLDERS, Path, Schema, View, reference

SPACE = r"\x20|\n(\x20{0,40}|\x09{0,10})"
"""The white space between the parts of JSON. It is bounded, because a small model may otherwise
write blanks until it reaches its token limit."""

JSON = {"whitespace_pattern": SPACE, "coerce_one_of": True}
"""llguidance's options. It reads `oneOf` as `anyOf`; the report names those that may overlap."""

ESCAPES = 'nrbtf\\"'


def text_of(schema: Schema) -> str:
    """Returns the schema as llguidance gets it, as JSON."""
    view = View(json.loads(json.dumps(schema)))
    return simplified_text(view, unsupported_keywords(view))


def simplified_text(view: View, unsupported: Iterable[UnsupportedKeyword]) -> str:
    """Returns a view's schema as JSON, simplified in place. unsupported: what a grammar
    can't enforce."""
    simplify(view, unsupported)
    if view.root is False:
        return "false"
    members = view.root if isinstance(view.root, dict) else {}
    # with \u the model could write a listed property's name in a form that avoids its schema
    escapes = {"json_allowed_escapes": ESCAPES if _may_spell(view) else ESCAPES + "u"}
    return json.dumps({**members, "x-guidance": JSON | escapes})


def simplify(view: View, unsupported: Iterable[UnsupportedKeyword]) -> None:
    """Leaves pointers as the only references, and takes out keywords that constrain nothing or that
    are unsupported.

    Every `oneOf` stays where it is: references may point into it, and it is read as `anyOf`.
    """
    if isinstance(view.root, dict):
        view.root.pop("x-guidance", None)
    dropped: dict[Path, set[str]] = {}
    for path, keyword, _ in unsupported:
        if keyword != "oneOf":
            dropped.setdefault(path, set()).add(keyword)
    parts = [
        (part, view.links(part).target, listed_names(view, part), names_pattern(view, part))
        for part in view.reached()
        if isinstance(part.schema, dict)
        and (part.path in dropped or not _SIMPLIFIED.isdisjoint(part.schema))
    ]
    changed = False
    for part, target, names, pattern in parts:
        path, found = part
        assert isinstance(found, dict)
        if names is not None:
            list_names(found, part, names)
        if pattern is not None:
            match_names(found, pattern)
        implied = _implied(found) if "allOf" in found else _NOTHING
        if implied and (*path, *implied) not in view.referred_places:
            dropped.setdefault(path, set()).update(implied)
        removed = _simplify(found, dropped.get(path, _NOTHING))
        changed = changed or not HOLDERS.isdisjoint(removed)
        changed = changed or names is not None or pattern is not None
        if target:
            found["$ref"] = reference(target.path)
    if changed:
        view.forget()


Keywords = frozenset[str] | set[str]
_NOTHING = frozenset[str]()
_COUNTS = frozenset(COUNTS)
_BOUNDS = frozenset(("minimum", "maximum"))
_SIMPLIFIED = DROPPABLE.union(_COUNTS, _BOUNDS, ("pattern", "$ref", "propertyNames", "allOf"))
"""The keywords of which some uses are written in another way, or left out."""


def _implied(schema: dict[str, Any]) -> Keywords:
    """Returns `anyOf` if `allOf` already requires one of its options. llguidance would join each
    option with all the rest."""
    listed = any(option in schema["allOf"] for option in schema.get("anyOf", ()))
    return frozenset(("anyOf",)) if listed else _NOTHING


def _simplify(schema: dict[str, Any], dropped: Keywords) -> Keywords:
    """Returns the keywords that it has removed."""
    idle = DROPPABLE.intersection(schema)
    removed = dropped.union(key for key in idle if key in IDLE or is_vacuous(schema, key))
    for key in removed:
        schema.pop(key, None)
    for key in _COUNTS.intersection(schema):
        schema[key] = int(schema[key])
    for key in _BOUNDS.intersection(schema):
        if (bound := wide_bound(schema, key)) is not None:
            schema[key] = bound
    if "pattern" in schema:
        schema["pattern"] = patterns.as_rust(schema["pattern"])
    return removed


def _may_spell(view: View) -> bool:
    """Whether an object with listed properties also allows members of any other name."""
    named = ("properties", "required", "patternProperties")
    return any(
        isinstance(found, dict) and any(found.get(key) for key in named) and not is_closed(found)
        for _, found in view.reached()
    )
