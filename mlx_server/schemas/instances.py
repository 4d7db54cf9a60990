"""The shortest instance of a schema, and the schemas that constrain one value together.

The instances are proposals, to be checked by a matcher of the schema's grammar: rare cases, such as
two patterns for one text, may come out wrong here.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any
from urllib.parse import unquote

from mlx_server.schemas.number_endings import number_endings
from mlx_server.schemas.regex_tails import RegexTails, regex_tails
from mlx_server.schemas.types import named, type_of

Parts = tuple[Mapping[str, Any], ...]
"""Schemas without references and alternatives, which constrain the same value."""

MOST_CHARACTERS = 20_000
"""The most characters of an instance; a longer one counts as none."""
MOST_ALTERNATIVES = 64
"""The most alternatives of one value that are looked at."""
LOOKS, LEAST_LOOKS = 20_000, 200
"""The most alternatives that are looked at in all, and for a single instance after these: those
within others multiply."""
MOST_STEPS = 2000
"""The most schemas that are looked at for the alternatives of one value."""
MOST_DEPTH = 48
"""The most schemas within schemas of an instance."""
MOST_MATCHED = 256
"""The characters of a longest name in which a pattern is searched."""

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
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def compact(value: Any) -> str:
    return _encoder.encode(value)


class Instances:
    """The shortest instances of a schema and of all schemas inside it."""

    def __init__(self, root: Any, frame: Any = None) -> None:
        """frame: the schema of an object around the instance, whose references are those of
        `root`."""
        self.root = root
        self.start = root if frame is None else frame
        self._targets: dict[str, Any] = {}
        self._alternatives: dict[tuple[int, ...], list[Parts]] = {}
        self._texts: dict[tuple[int, ...], str | None] = {}
        self._open = set[tuple[int, ...]]()
        self._looks = LOOKS
        """The alternatives that may still be looked at."""
        self._steps = 0

    def alternatives(self, schemas: Sequence[Any]) -> list[Parts]:
        """Returns the combinations of schemas of which a value has to match one, where it has to
        match all of `schemas`."""
        key = tuple(map(id, schemas))
        if key not in self._alternatives:
            waiting = tuple((schema, False) for schema in schemas)
            self._steps = MOST_STEPS
            expanded = self._expanded(waiting, (), frozenset())
            self._alternatives[key] = list(islice(expanded, MOST_ALTERNATIVES))
        return self._alternatives[key]

    def _expanded(
        self, waiting: tuple[tuple[Any, bool], ...], parts: Parts, seen: frozenset[int]
    ) -> Iterator[Parts]:
        while waiting:
            self._steps -= 1
            if self._steps < 0:
                return
            (schema, is_expanded), *rest = waiting
            waiting = (*rest,)
            if schema is False:
                return
            if is_expanded:
                parts = (*parts, schema)
            elif isinstance(schema, Mapping) and id(schema) not in seen:
                seen |= {id(schema)}
                waiting = (*self._in_order(schema), *waiting)
                choices = [schema[key] for key in ("anyOf", "oneOf") if schema.get(key)]
                if choices:
                    for chosen in product(*choices):
                        options = ((option, False) for option in chosen)
                        yield from self._expanded((*options, *waiting), parts, seen)
                        if self._steps < 0:
                            return
                    return
        yield parts

    def _in_order(self, schema: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
        """Yields the schema, with True, and those that it applies, with False: in the order of its
        keywords, in which llguidance reads their members."""
        if "properties" not in schema:
            yield schema, True
        for key, value in schema.items():
            if key == "properties":
                yield schema, True
            elif key == "allOf":
                yield from ((part, False) for part in value)
            elif key == "$ref":
                yield self._target(value), False

    def _target(self, ref: str) -> Any:
        if ref not in self._targets:
            target = self.root
            for step in unquote(ref.removeprefix("#")).split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                target = target[int(step)] if isinstance(target, list) else target[step]
            self._targets[ref] = target
        return self._targets[ref]

    def text(self, schemas: Sequence[Any]) -> str | None:
        """Returns the shortest instance of all of these schemas, written compactly; None if none
        was found."""
        key = tuple(map(id, schemas))
        if key in self._texts:
            return self._texts[key]
        if key in self._open or len(self._open) > MOST_DEPTH:  # a recursion without an end
            return None
        if not self._open:
            self._looks = max(self._looks, LEAST_LOOKS)
        self._open.add(key)
        text = shortest(self._instance(parts) for parts in self.alternatives(schemas))
        self._open.remove(key)
        if text is not None and len(text) > MOST_CHARACTERS:
            text = None
        if text is not None or not self._open:  # elsewhere the recursion may have an end
            self._texts[key] = text
        return text

    def _instance(self, parts: Parts) -> str | None:
        self._looks -= 1
        if self._looks < 0:
            return None
        if (constants := constants_of(parts)) is not None:
            return shortest(map(compact, constants))
        return shortest(self._typed(parts, type) for type in sorted(types_of(parts)))

    def _typed(self, parts: Parts, type: str) -> str | None:
        match type:
            case "integer" | "number":
                return next(iter(number_endings(parts, "", whole=type == "integer")), None)
            case "string":
                return '"' + next(iter(string_endings(parts, "")), '"')
            case "array":
                items = self.more_items(parts, 0)
                return None if items is None else f"[{items[1:]}]"
            case "object":
                members = self.more_members(parts, ())
                return None if members is None else f"{{{members[1:]}}}"
        return _CONSTANTS[type]

    def more_items(self, parts: Parts, count: int) -> str | None:
        """Returns the items that an array lacks after `count` ones, a comma before each."""
        least = int(max(part.get("minItems", 0) for part in parts)) if parts else 0
        if least - count > MOST_CHARACTERS:
            return None
        own = max((len(_first_items(part)) for part in parts), default=0)
        known = _listed(self.text(item_of(parts, at)) for at in range(count, min(least, own)))
        missing = least - max(count, own)
        if missing <= 0 or known is None:
            return known
        other = self.text(item_of(parts, own))
        return None if other is None else known + f",{other}" * missing

    def more_members(self, parts: Parts, names: Sequence[str]) -> str | None:
        """Returns the members that an object lacks after those of these names, a comma before
        each."""
        listed = names_of(parts)
        required = dict.fromkeys(name for part in parts for name in part.get("required", ()))
        missing = [name for name in (*listed, *required) if name in required]
        missing = [name for name in dict.fromkeys(missing) if name not in names]
        least = int(max((part.get("minProperties", 0) for part in parts), default=0))
        if (more := least - len(names) - len(missing)) > 0:
            others = [name for name in listed if name not in (*names, *missing)]
            others += [f"a{n}" for n in range(len(names), len(names) + min(more, 64))]
            sized = sorted(others, key=lambda name: len(self.text(member_of(parts, name)) or _NONE))
            chosen = {*missing, *sized[:more]}
            missing = [name for name in (*listed, *missing, *others) if name in chosen]
        return _listed(self.member(parts, name) for name in dict.fromkeys(missing))

    def member(self, parts: Parts, name: str) -> str | None:
        """Returns the shortest member of this name."""
        value = self.text(member_of(parts, name))
        return None if value is None else f"{compact(name)}:{value}"


_NONE = " " * MOST_CHARACTERS


def _listed(texts: Iterable[str | None]) -> str | None:
    """Returns the texts with a comma before each; None if one of them is None."""
    listed = ""
    for text in texts:
        if text is None or len(listed) > MOST_CHARACTERS:
            return None
        listed += f",{text}"
    return listed


def shortest(texts: Iterable[str | None]) -> str | None:
    return min((text for text in texts if text is not None), key=len, default=None)


def types_of(parts: Parts) -> frozenset[str]:
    return frozenset.intersection(named({}), *map(named, parts))


def constants_of(parts: Parts) -> list[Any] | None:
    """Returns the only values that the schemas allow, by their `const` or `enum`; None if none of
    them has either."""
    lists = [[part["const"]] if "const" in part else part.get("enum") for part in parts]
    first, *others = [values for values in lists if values is not None] or [None]
    types = types_of(parts)
    return first and [
        value
        for value in first
        if type_of(value) in types and all(value in other for other in others)
    ]


def names_of(parts: Parts) -> list[str]:
    """Returns the names of the members that the schemas list, in order."""
    return [*dict.fromkeys(name for part in parts for name in part.get("properties", ()))]


def member_of(parts: Parts, name: str) -> list[Any]:
    """Returns the schemas that constrain the member of this name."""
    return [schema for part in parts if (schema := _member(part, name)) is not True]


def item_of(parts: Parts, at: int) -> list[Any]:
    return [schema for part in parts if (schema := _item(part, at)) is not True]


def _member(schema: Mapping[str, Any], name: str) -> Any:
    listed = schema.get("properties", {})
    if name in listed:
        return listed[name]
    for pattern, inner in schema.get("patternProperties", {}).items():
        if _is_in(pattern, name):
            return inner
    return schema.get("additionalProperties", True)


def _is_in(pattern: str, name: str) -> bool:
    """Whether the pattern is found in the name, for patterns that can't take long."""
    is_simple = re.fullmatch(r"\^?[\w.\[\]\-]*[+*]?\$?", pattern)
    try:
        return bool(is_simple and re.search(pattern, name[:MOST_MATCHED], re.ASCII))
    except re.error:
        return False


def _item(schema: Mapping[str, Any], at: int) -> Any:
    items, first = schema.get("items", True), _first_items(schema)
    if at < len(first):
        return first[at]
    return schema.get("additionalItems", True) if isinstance(items, list) else items


def _first_items(schema: Mapping[str, Any]) -> Sequence[Any]:
    items = schema.get("items")
    return schema.get("prefixItems") or (items if isinstance(items, list) else ())


def expressions_of(parts: Parts) -> list[RegexTails]:
    """Returns the tails of the texts that `pattern` and `format` allow."""
    written = [part.get("pattern") for part in parts]
    written += [FORMATS.get(str(part.get("format"))) for part in parts]
    tails = (regex_tails(pattern) for pattern in written if isinstance(pattern, str))
    return [one for one in tails if one]


def string_endings(parts: Parts, begun: str) -> Iterator[str]:
    """Yields texts that may end a string after `begun`, with its quote, the likeliest first."""
    tails = expressions_of(parts)
    least = int(max((part.get("minLength", 0) for part in parts), default=0))
    if not begun and tails:
        text = max((one.shortest for one in tails), key=len)
        yield compact(text + "a" * (least - len(text)))[1:]
    elif tails:
        texts = {text for one in tails for text in one.tails}
        yield from (compact(text)[1:] for text in sorted(texts, key=lambda t: (len(t), t)))
    else:
        yield "a" * min(max(least - len(begun), 0), MOST_CHARACTERS) + '"'
