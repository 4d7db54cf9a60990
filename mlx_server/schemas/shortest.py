"""The shortest instance of a schema and of every schema inside it.

The instances are proposals, to be checked by a matcher of the schema's grammar: rare cases, such as
two patterns for one text, may come out wrong here.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from mlx_server.schemas.bounds import NUMERIC
from mlx_server.schemas.regex_tails import RegexTails, regex_tails
from mlx_server.schemas.shortest_number import Parts, shortest_number, shortest_of
from mlx_server.schemas.types import named
from mlx_server.schemas.view import LEADING, Part, children

MOST_CHARACTERS = 20_000
"""The most characters of an instance; a longer one counts as none."""
MOST_PARTS = 4_000
"""The most schemas that are looked at."""
MOST_OPTIONS = 64
MOST_LOOKS = 20_000
"""The most combinations of schemas that are looked at: options within options multiply."""
MOST_SEARCHED = 256
"""The characters of a longest name in which a pattern is searched."""
MOST_DEPTH = 64
"""The depth of schemas within schemas in one pass; deeper ones get their instance in the next
pass."""
PASSES = 8
"""The most times that the instances of a recursive schema are improved."""

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {
    "date-time": f"{_DATE}T{_TIME}",
    "time": _TIME,
    "date": _DATE,
    "duration": r"PT?[0-9]+(D|H|M|S|W|Y)",
    "email": r"[a-z]+@(?:[a-z]+(\.[a-z]+)*|\[([0-9]\.){3}[0-9]\])",
    "hostname": r"[a-z]+(\.[a-z]+)*",
    "ipv4": r"([0-9]\.){3}[0-9]",
    "ipv6": r"::|([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": r"[a-z]+:(//\[(::|v0\.0)\])?(%[0-9a-f]{2})*",
}
"""Expressions of some texts of each format, from which their tails are taken."""

_CONSTANTS = {"null": "null", "boolean": "true"}
_SHORTEST = {"string": '""', "array": "[]", "object": "{}", **_CONSTANTS}
"""The shortest value of each type except numbers."""

_LENGTHENING = frozenset(
    (
        *("const", "enum", "$ref", "allOf", "anyOf", "oneOf", "required", "minProperties"),
        *("minItems", "minLength", "pattern", "format", *NUMERIC),
    )
)
"""Keywords without which the shortest value is that of the type."""


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def compact(value: Any) -> str:
    return _encoder.encode(value)


def patterns_of(schema: Mapping[str, Any]) -> list[RegexTails]:
    """Returns the tails of the texts that the schema's own `pattern` and `format` allow."""
    if "pattern" not in schema and "format" not in schema:
        return []
    written = [schema.get("pattern"), FORMATS.get(str(schema.get("format")))]
    found = (regex_tails(pattern) for pattern in written if isinstance(pattern, str))
    return [tails for tails in found if tails]


class ShortestInstances:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._targets: dict[str, Any] = {}
        self._known: dict[int, str | None] = {}
        self._before: dict[int, str | None] = {}
        """The results of the previous pass, for schemas that refer to themselves."""
        self._open: set[int] = set()
        self._unsettled: set[int] = set()
        """Schemas whose instance depends on one that refers to itself, for the next pass."""
        self._recursed = False
        """Whether the instance that is being made depends on such a schema."""
        self._looks = 0
        self.schemas = list(islice(self._reached(), MOST_PARTS))
        """The root and all the schemas that it uses."""
        unsettled = self.schemas
        for _ in range(PASSES):
            settled = self._known.keys() - self._unsettled
            self._before, self._known = self._known, {id: self._known[id] for id in settled}
            self._unsettled = set()
            for schema in unsettled:
                self.text(schema)
            if not self._unsettled or self._known == self._before:
                break
            unsettled = [schema for schema in self.schemas if self._is_unsettled(schema)]

    def _is_unsettled(self, schema: Mapping[str, Any]) -> bool:
        followed = self._followed(schema) if "$ref" in schema else schema
        return id(followed) in self._unsettled

    def text(self, schema: Any) -> str | None:
        """Returns the shortest instance, written compactly; None if none was found."""
        if not isinstance(schema, bool) and "$ref" in schema:
            schema = self._followed(schema)
        if isinstance(schema, bool):
            return "0" if schema else None
        if _LENGTHENING.isdisjoint(schema) and isinstance(type := schema.get("type", ""), str):
            return _SHORTEST.get(type, "0")
        if id(schema) in self._known:
            self._recursed = self._recursed or id(schema) in self._unsettled
            return self._known[id(schema)]
        parts = self._flattened(schema)
        if self._are_open(parts) or len(self._open) > MOST_DEPTH:
            self._recursed = True
            return self._before.get(id(schema))
        outside, self._recursed = self._recursed, False
        self._open.add(id(schema))
        found = self._shortest(parts)
        self._open.remove(id(schema))
        if self._recursed:
            self._unsettled.add(id(schema))
        self._recursed = self._recursed or outside
        self._known[id(schema)] = found = found if len(found or "") < MOST_CHARACTERS else None
        return found

    def _are_open(self, parts: Parts) -> bool:
        """Whether an instance of one of these schemas is being made already."""
        found = any(id(part) in self._open for part in parts)
        self._recursed = self._recursed or found
        return found

    def members(self) -> Iterator[tuple[str, str | None]]:
        """Yields the name and the shortest value of each member that a schema lists or requires."""
        for schema in self.schemas:
            listed = _mapping(schema, "properties")
            for name, inner in listed.items():
                yield name, self.text(inner)
            for name in _names(schema):
                if name not in listed:
                    yield name, self._any([self._member(schema, name)])

    def required(self) -> set[str]:
        """Returns the names of members that a schema requires."""
        return {name for schema in self.schemas for name in _names(schema)}

    def _reached(self) -> Iterator[Mapping[str, Any]]:
        waiting, seen = [self._root], set[int]()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            yield schema
            if LEADING.isdisjoint(schema):
                continue
            waiting += [part.schema for part in reversed(children(Part((), schema)))]
            if "$ref" in schema:
                waiting.append(self._target(schema))

    def _followed(self, schema: Any) -> Any:
        """Returns the schema, or the one to which its `$ref` leads if it says nothing else."""
        for _ in range(MOST_DEPTH):
            if isinstance(schema, bool) or "$ref" not in schema or not _ALIAS.issuperset(schema):
                break
            target = self._target(schema)
            if not isinstance(target, (dict, bool)):
                break
            schema = target
        return schema

    def _target(self, schema: Mapping[str, Any]) -> Any:
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return None
        if ref not in self._targets:
            self._targets[ref] = self._pointed(ref)
        return self._targets[ref]

    def _pointed(self, ref: str) -> Any:
        from urllib.parse import unquote

        found = self._root
        for step in unquote(ref.removeprefix("#")).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(step)] if isinstance(found, list) else found[step]
            except (KeyError, IndexError, ValueError, TypeError):
                return None
        return found

    def _flattened(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns the schema, the target of its `$ref`, the schemas of its `allOf`, and theirs in
        turn: in the order of its keywords, in which llguidance reads their members."""
        if "$ref" not in schema and "allOf" not in schema:
            return [schema]
        parts: list[Mapping[str, Any]] = []
        waiting: list[tuple[Any, bool]] = [(schema, False)]
        seen = set[int]()
        while waiting and len(parts) < MOST_OPTIONS:
            part, is_own = waiting.pop()
            if is_own:
                parts.append(part)
            elif isinstance(part, dict) and id(part) not in seen:
                seen.add(id(part))
                waiting += reversed([*self._in_order(part)])
        return parts

    def _in_order(self, schema: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
        """Yields the schema, with True, and those that it applies, with False."""
        if "properties" not in schema:
            yield schema, True
        for keyword in schema:
            match keyword:
                case "properties":
                    yield schema, True
                case "$ref":
                    yield self._target(schema), False
                case "allOf":
                    yield from ((one, False) for one in _list(schema["allOf"]))

    def _shortest(self, parts: Parts, depth: int = 4) -> str | None:
        self._looks += 1
        if self._looks > MOST_LOOKS:
            return None
        values = next((v for part in parts if (v := constants_of(part)) is not None), None)
        if values is not None:
            return shortest_of(map(compact, values))
        for at, part in enumerate(parts):
            for key in ("anyOf", "oneOf"):
                if options := _list(part.get(key))[:MOST_OPTIONS]:
                    rest = {name: value for name, value in part.items() if name != key}
                    others = [*parts[:at], rest, *parts[at + 1 :]]
                    return shortest_of(self._option(others, one, depth) for one in options)
        types = frozenset.intersection(*map(named, parts))
        return shortest_of(self._typed(parts, name) for name in sorted(types))

    def _option(self, others: Parts, option: Any, depth: int) -> str | None:
        if option is False or not depth:
            return None
        if not any(map(_constrains, others)):
            return self.text(option)
        inner = self._flattened(option) if isinstance(option, dict) else []
        if self._are_open(inner):
            return self.text(option)
        return self._shortest([*inner, *others], depth - 1)

    def _typed(self, parts: Parts, type: str) -> str | None:
        match type:
            case "integer" | "number":
                return shortest_number(parts, whole=type == "integer")
            case "string":
                return _string(parts)
            case "array":
                return self._array(parts)
            case "object":
                return self._object(parts)
        return _CONSTANTS[type]

    def _array(self, parts: Parts) -> str | None:
        least = int(max(part.get("minItems", 0) for part in parts))
        if least > MOST_CHARACTERS:
            return None
        items = [self._any([_item(part, at) for part in parts]) for at in range(min(least, 64))]
        items += items[-1:] * (least - len(items))
        whole = [item for item in items if item is not None]
        if sum(map(len, whole)) > MOST_CHARACTERS:
            return None
        return f"[{','.join(whole)}]" if len(whole) == len(items) else None

    def _object(self, parts: Parts) -> str | None:
        required = {name: None for part in parts for name in _names(part)}
        listed = {name: None for part in parts for name in _mapping(part, "properties")}
        names = [*(n for n in listed if n in required), *(n for n in required if n not in listed)]
        texts: dict[str, str] = {}
        for name in names:
            value = self._any([self._member(part, name) for part in parts])
            if value is None:
                return None
            texts[name] = value
        missing = int(max(part.get("minProperties", 0) for part in parts)) - len(texts)
        if missing > 0:
            texts |= self._more(parts, [n for n in listed if n not in texts], missing)
            texts = {name: texts[name] for name in [*listed, *texts] if name in texts}
        return "{" + ",".join(f"{compact(name)}:{value}" for name, value in texts.items()) + "}"

    def _more(self, parts: Parts, optional: list[str], missing: int) -> dict[str, str]:
        names = [*optional, *islice((f"a{n}" for n in range(missing)), MOST_OPTIONS)]
        values = {n: self._any([self._member(part, n) for part in parts]) for n in names}
        known = [(name, value) for name, value in values.items() if value is not None]
        return dict(sorted(known, key=lambda member: len(member[0] + member[1]))[:missing])

    def _any(self, schemas: Sequence[Any]) -> str | None:
        """Returns the shortest instance of all of these schemas at once."""
        telling = [one for one in schemas if one is not True and one != {}]
        if len(telling) <= 1:
            return self.text(telling[0]) if telling else "0"
        if False in telling:
            return None
        parts = [part for one in telling for part in self._flattened(one)]
        if self._are_open(parts):
            return None
        return self._shortest(parts)

    def _member(self, schema: Mapping[str, Any], name: str) -> Any:
        listed = _mapping(schema, "properties")
        if name in listed:
            return listed[name]
        for pattern, inner in _mapping(schema, "patternProperties").items():
            if _found(pattern, name):
                return inner
        return schema.get("additionalProperties", True)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = schema.get(key)
    return found if isinstance(found, dict) else {}


def _names(schema: Mapping[str, Any]) -> list[str]:
    if "required" not in schema:
        return []
    return [name for name in _list(schema["required"]) if isinstance(name, str)]


def constants_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the only values that the schema allows, by its `const` or `enum`; None if it has
    neither."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


_ANNOTATIONS = frozenset(("$defs", "definitions", "title", "description", "default", "x-guidance"))
_ALIAS = _ANNOTATIONS | {"$ref"}


def _constrains(schema: Mapping[str, Any]) -> bool:
    return not _ANNOTATIONS.issuperset(schema)


def _item(schema: Mapping[str, Any], at: int) -> Any:
    items = schema.get("items", True)
    first = _list(schema.get("prefixItems")) or _list(items)
    if at < len(first):
        return first[at]
    return schema.get("additionalItems", True) if isinstance(items, list) else items


def _found(pattern: str, name: str) -> bool:
    """Whether the pattern is found in the name, for patterns that can't take long."""
    simple = re.fullmatch(r"\^?[\w.\[\]\-]*[+*]?\$?", pattern)
    return bool(simple and len(name) <= MOST_SEARCHED and _searched(pattern, name))


def _searched(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name, re.ASCII) is not None
    except re.error:
        return False


def _string(parts: Parts) -> str:
    texts = [tails.shortest for part in parts for tails in patterns_of(part)]
    text = max(texts, key=len, default="")
    least = int(max(part.get("minLength", 0) for part in parts))
    return compact(text + "a" * (min(least, MOST_CHARACTERS) - len(text)))
