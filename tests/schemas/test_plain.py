import random
from contextlib import suppress
from typing import Any

import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.schemas.bounds import EXACT
from mlx_server.schemas.check import check
from mlx_server.schemas.compiler import fault
from mlx_server.schemas.disjoint import Disjointness
from mlx_server.schemas.grammar import simplified_text
from mlx_server.schemas.plain import (
    LARGEST_PATTERNS,
    LONGEST,
    MOST_COPIED,
    MOST_JOINED,
    MOST_PARTS,
    is_plain,
)
from mlx_server.schemas.report import FORMATS, unsupported_keywords
from mlx_server.schemas.view import View

NAMES = ("a", "b", "c d", "ß", '"', "\\", "a\n", "")
PIECES = ("a", "ß", " ", ".", r"\d", r"\W", r"\.", r"\$", "[a-z]", r"[^\w.-]", "(a|bc)", "(?:x.+)")
TIMES = ("", "", "*", "+", "?", "{2}", "{1,}", "{0,3}")
SCALARS = ("", "x", '"', "a\nb", "ß😀", 0, -1, EXACT, True, False, None)


def plain_schema(rng: random.Random, depth: int = 3) -> Any:
    """A schema of every kind that counts as plain."""
    deep = [object_schema, list_schema, choice_schema, joined_schema]
    kinds = [scalar_schema, *deep] if depth else [scalar_schema]
    schema = rng.choice(kinds)(rng, depth - 1)
    return schema if rng.random() < 0.7 else schema | {"title": "T", "description": "D"}


def scalar_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    low, high = sorted(rng.sample((-EXACT, -3, 0, 1, 7, 1000, EXACT), 2))
    least, most = sorted(rng.sample(range(LONGEST + 1), 2))
    return rng.choice(
        (
            {},
            {"enum": rng.sample(SCALARS, 3)},
            {"const": rng.choice(SCALARS)},
            {"type": "string", "enum": ["p", "q"]},
            {"type": ["string", "null"], "enum": ["p", None]},
            {"type": "string", "format": rng.choice(sorted(FORMATS))},
            {"type": "string", "minLength": least, "maxLength": most},
            {"type": "string", "minLength": most},
            {"type": rng.choice(("integer", "number")), "minimum": low, "maximum": high},
            {"type": "number", "maximum": low},
            {"type": ["number", "null"], "minimum": low, "maximum": high},
            {"type": "string", "minimum": 0, "minItems": 1},
            {"minLength": least, "minimum": low},
            {"anyOf": [{"type": "number"}, {"type": "object", "properties": {}}], "minimum": low},
            {"type": "string", "pattern": pattern(rng)},
            {"type": rng.choice(("string", "integer", "number", "boolean", "null"))},
            {"type": rng.sample(("string", "integer", "number", "array", "object", "null"), 2)},
            {"$ref": "#/$defs/other"},
        )
    )


def pattern(rng: random.Random) -> str:
    pieces = [rng.choice(PIECES) + rng.choice(TIMES) for _ in range(rng.randint(1, 4))]
    return rng.choice(("", "^")) + "".join(pieces) + rng.choice(("", "$"))


def object_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(5))
    members = {name: plain_schema(rng, depth) for name in names}
    found: dict[str, Any] = {"properties": members}
    found |= rng.choice(({}, {"type": "object"}))
    found |= rng.choice(({}, {"required": [name for name in names if rng.random() < 0.5]}))
    extra = rng.choice((True, False, plain_schema(rng, depth)))
    if extra is not False and rng.random() < 0.3:
        found["required"] = ["another", *found.get("required", ())]
    return found | rng.choice(({}, {"additionalProperties": extra}))


def list_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    least, most = sorted(rng.choices(range(9), k=2))
    found = {"type": "array", "items": plain_schema(rng, depth)}
    return found | rng.choice(({}, {"minItems": least}, {"minItems": least, "maxItems": most}))


def choice_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        rng.choice(("anyOf", "oneOf")): [plain_schema(rng, depth) for _ in range(rng.randint(1, 3))]
    }


def joined_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    found = [scalar_schema(rng, 0) for _ in range(rng.randrange(3))]
    others = {str(n): one for n, one in enumerate(found) if "$ref" not in one}  # to itself perhaps
    mode = {"type": "string"} | rng.choice(({}, {"enum": ["x"]}, {"pattern": "^x"}))
    own = {"type": "object", "properties": {"mode": mode, **others}, "required": ["mode"]}
    return rng.choice(
        (
            {"allOf": [{"$ref": "#/$defs/base"}, own]},
            {"allOf": [{"$ref": "#/$defs/base"}], **own},
            {"allOf": [{"allOf": [{"$ref": "#/$defs/base"}]}, own]},
        )
    )


BASE = {
    "type": "object",
    "properties": {"mode": {"type": ["string", "null"]}, "id": {"type": "integer"}, "x": True},
    "required": ["id"],
}


def why_refused(view: View) -> str:
    found = unsupported_keywords(view, Disjointness(view).holds)
    return fault(f"start: {simplified_text(view, found)}")


@pytest.mark.parametrize("seed", range(8))
def test_llguidance_takes_all_plain_schemas(seed: int) -> None:
    rng, tried = random.Random(seed), 0
    while tried < 25:
        schema = plain_schema(rng) | {"$defs": {"other": plain_schema(rng, 2), "base": BASE}}
        view = View(schema)
        with suppress(InvalidGrammar):  # a reference that leads nowhere but to itself
            check(view)
            tried += 1
            assert is_plain(view), schema
            assert not why_refused(view), schema


OTHERS: dict[str, dict[str, Any]] = {
    "nothing conforms": {"properties": {"a": False}},
    "nothing conforms to a name that is a keyword": {
        "properties": {"additionalProperties": False, "properties": {"properties": {}}}
    },
    "an item that can't be": {"items": False, "minItems": 1},
    "a required name that is not listed": {"required": ["a"], "additionalProperties": False},
    "values of another type": {"type": "integer", "enum": ["a"]},
    "values of none of the types": {"type": ["integer", "null"], "enum": ["a"]},
    "a truth value is no number": {"type": "integer", "const": True},
    "values that are objects": {"enum": [{"a": 1}]},
    "an inexact number": {"const": EXACT + 1},
    "bounds in the wrong order": {"type": "integer", "minimum": 2, "maximum": 1},
    "bounds with fractions": {"type": "integer", "minimum": 1.5, "maximum": 1.7},
    "lengths in the wrong order": {"type": "string", "minLength": 2, "maxLength": 1},
    "a long text": {"type": "string", "minLength": LONGEST + 1},
    "many items": {"type": "array", "items": {}, "maxItems": LONGEST + 1},
    "counts in the wrong order": {"type": "array", "minItems": 2, "maxItems": 1},
    "items by place": {"items": [{}]},
    "an expression that nothing matches": {"type": "string", "pattern": "a^b"},
    "an expression with a group in a group": {"type": "string", "pattern": "((a))"},
    "an expression of a length": {"type": "string", "pattern": "a", "minLength": 2},
    "an expression of all types": {"pattern": "a"},
    "a large expression": {
        "type": "string",
        "pattern": f"(a{{999}}){{{1 + LARGEST_PATTERNS // 999}}}",
    },
    "an unknown format": {"type": "string", "format": "colour"},
    "a length in a format": {"type": "string", "format": "date", "minLength": 3},
    "a reference next to others": {"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {}}},
    "choices next to others": {"type": "string", "anyOf": [{}]},
    "schemas that are joined": {"allOf": [{"type": "string"}]},
    "one of several next to others": {"type": "string", "oneOf": [{"type": "string"}]},
    "bounds of choices with bounds": {"anyOf": [{"type": "number", "minimum": 2}], "maximum": 1},
    "bounds of any choice": {"anyOf": [True], "maximum": 1},
    "llguidance's own options": {"x-guidance": {"item_separator": ";"}},
    "many parts": {"properties": {str(n): {} for n in range(MOST_PARTS)}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_tried(name: str) -> None:
    assert not is_plain(View(OTHERS[name]))
    around = {"anyOf": [{"type": "null"}, {"properties": {"p": OTHERS[name]}}]}
    assert not is_plain(View(around | {"$defs": {"a": {}}}))


def described(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def levels(number: int) -> dict[str, Any]:
    """Members that join schemas with such members."""
    own: dict[str, Any] = {"0": described(a={})}
    for n in range(1, number):
        joined = {"allOf": [{"$ref": f"#/$defs/{n - 1}"}, described(b={})]}
        own[f"{n}"] = described(c=joined, d=joined, e=joined)
    return {"$ref": f"#/$defs/{number - 1}", "$defs": own}


WIDE: dict[str, Any] = {f"{n}": {} for n in range(MOST_COPIED // 9)}
JOINS: dict[str, dict[str, Any]] = {
    "two that say more of a member": {
        "allOf": [described(a={"enum": [1]}), described(a={"enum": [2]})]
    },
    "a member of two types": {"allOf": [described(a={"type": "null"}), described(a={"enum": [1]})]},
    "no member": {"allOf": [described(a=False), described(a={"type": "null"})]},
    "no other members": {"allOf": [described(), described() | {"additionalProperties": False}]},
    "values": {"allOf": [described(), {"enum": [{}]}]},
    "choices": {"allOf": [described(), {"anyOf": [described()]}]},
    "no objects": {"allOf": [{"type": "array"}]},
    "itself": {"allOf": [{"$ref": "#"}, described()]},
    "a member that is the whole": {"allOf": [described(a={}), described(a={"$ref": "#"})]},
    "many": {"allOf": [described()] * MOST_JOINED},
    "many members, often": {
        "properties": {f"{n}": {"allOf": [{"$ref": "#/$defs/wide"}]} for n in range(9)},
        "$defs": {"wide": described(**WIDE)},
    },
    "members that join members": levels(8),
}


@pytest.mark.parametrize("name", JOINS)
def test_other_joined_schemas_are_tried(name: str) -> None:
    assert not is_plain(View(JOINS[name]))


def test_what_is_joined_a_few_times_is_plain() -> None:
    """Otherwise the schemas above could be others for another reason."""
    assert is_plain(View(levels(3)))
    few = {**JOINS["many members, often"]}
    few["properties"] = {name: few["properties"][name] for name in "012"}
    assert is_plain(View(few))
    assert is_plain(View({"allOf": [described()] * (MOST_JOINED - 1)}))
