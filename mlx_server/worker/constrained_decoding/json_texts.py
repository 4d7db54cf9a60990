"""Texts that may end a JSON value which is being written, from what its schemas plainly say.

Each schema has a sample: about its shortest instance. Samples of members and listed values are
proposed where the text stands, and single characters for what no sample fits. All of them are only
proposals, to be checked by the grammar's matcher.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from fractions import Fraction
from functools import lru_cache
from itertools import chain, islice, product
from typing import Any, NamedTuple

from mlx_server.grammars.patterns import PIECE, without_nested_classes
from mlx_server.grammars.view import View, named

Schema = Mapping[str, Any]

MOST_CHARACTERS = 20_000
"""The most characters of a sample; a longer one counts as none."""
MOST_ALTERNATIVES = 16
MOST_DEPTH = 32
"""The most references, alternatives and members within each other that are followed."""
MOST_LOOKS = 20_000
"""The most schemas that are looked at in all."""
MOST_SCHEMAS = 1000
MOST_MORE = 7
"""The digits of a step from which on no multiple of it is made."""
MOST_DIGITS = 24
"""The most digits of a number of which a multiple is made."""
MOST_PROPOSED = 64
"""The most members, words or beginnings that are proposed in one place."""

FORMATS = {
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "date": "2000-01-01",
    "duration": "P1D",
    "email": "a@a.a",
    "hostname": "a.a",
    "ipv4": "1.1.1.1",
    "ipv6": "0:0:0:0:0:0:0:0",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "uri": "a:a",
}
CHARACTERS = [*"a0@.:/-_ A1bB+,~!#%&()*;<=>?[]^`{|}$nuf"]
"""The characters that are tried in a string, and for a class of characters."""
DIGITS = "0512346789"
LITERALS = [word[at:] for word in ("true", "false", "null") for at in range(1, len(word))]
VALUES = ['""', "1", "null", "true", "false", "[]", "{}", "0", '"', "{", "[", "-"]
_ESCAPES = {r"\d": "0", r"\D": "a", r"\w": "a", r"\W": "-", r"\s": " ", r"\S": "a", r"\n": "\n"}
_ESCAPES |= {r"\r": "\r", r"\t": "\t", r"\A": "", r"\z": "", r"\Z": ""}
_APPLIED = ("$ref", "allOf", "anyOf", "oneOf")
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class Member(NamedTuple):
    """A member of an object, as a sample writes it."""

    name: str
    value: str
    """A sample of its value; empty if none is known."""
    rest: str
    """The required members after it and the end of the object; empty if they are not known."""
    required: bool

    @property
    def key(self) -> str:
        return f"{_encoder.encode(self.name)}:"


class JsonText:
    """The end of the JSON that a row has written. Its fields are never changed in place, so that a
    copy may go its own way."""

    def __init__(self, controls: tuple[int, ...] = ()) -> None:
        self.controls = controls
        """The control tokens before it."""
        self.begun: bytes | None = None
        """The text of the string that is open."""
        self.key = ""
        """The name of the latest member."""
        self.last = b""
        """The last character outside of strings, besides white space."""
        self.is_opened = False
        """Whether any bracket came."""
        self.number = b""
        """The digits and the point of a number that may go on."""
        self._string = b""

    def after(self, text: bytes) -> "JsonText":
        following = copy(self)
        following.read(text)
        return following

    def read(self, text: bytes) -> None:
        while text:
            before, quote, text = text.partition(b'"')
            if self.begun is None:
                self._read_outside(before)
                self.begun = b"" if quote else None
            else:
                self.begun += before
                if quote and (len(self.begun) - len(self.begun.rstrip(b"\\"))) % 2:
                    self.begun += quote
                elif quote:
                    self._string, self.begun, self.last = self.begun, None, quote

    def _read_outside(self, text: bytes) -> None:
        if b":" in text:
            self.key = self._string.decode("utf-8", "ignore")
        self.is_opened = self.is_opened or b"{" in text or b"[" in text
        self.last = text.strip()[-1:] or self.last
        digits = (self.number + text)[-MOST_DIGITS:]
        self.number = digits[len(digits.rstrip(b"0123456789.")) :]

    @property
    def is_between(self) -> bool:
        """Whether an array or object may have ended."""
        return self.begun is None and self.last in (b"}", b"]")


class SchemaTexts:
    """The samples of schemas and of everything inside them."""

    def __init__(self, roots: Sequence[Any], frames: Iterable[tuple[Any, Any]] = ()) -> None:
        """frames: schemas of objects around instances, each with the root of its references."""
        self._samples: dict[int, str | None] = {}
        self._open = set[int]()
        self._looks = MOST_LOOKS
        self._members: dict[str, list[Member]] = {}
        """The members of objects, by their names in the order of the schemas."""
        self._words, self._items = dict[str, None](), dict[str, None]()
        """Listed values, and samples of the items of arrays."""
        self._steps = dict[Fraction, None]()
        """The values of `multipleOf`."""
        self._view = View({})
        self.roots, self.inner = list[str](), list[str]()
        """The samples of the schemas, and of those inside them."""
        self.width = 0
        """The most members of an object."""
        for schema, root in (*zip(roots, roots, strict=True), *frames):
            self._read(schema, root)
        texts = dict.fromkeys((*self.roots, *self._items, *self.inner))
        self._strings = [text for text in texts if text[:1] == '"'][:MOST_ALTERNATIVES]

    def _read(self, start: Any, root: Any) -> None:
        self._view = View(root)
        self.roots.append(self._sample(start) or "")
        for schema in _inside(start):
            if (sample := self._sample(schema)) and schema is not root:
                self.inner.append(sample)
            if isinstance(schema.get("items"), dict) and (item := self._sample(schema["items"])):
                self._items[item] = None
            if isinstance(step := schema.get("multipleOf"), int | float) and step > 0:
                self._steps[Fraction(str(step))] = None
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            for value in values if isinstance(values, list) else ():
                self._words[_encoder.encode(value)] = None
            for merged in self._merged(schema, MOST_DEPTH) if "properties" in schema else ():
                self._add_members(merged)

    def _add_members(self, merged: Schema) -> None:
        required = _required(merged)
        names = [*dict.fromkeys([*merged.get("properties", ()), *required])]
        self.width = max(self.width, len(names))
        for name in names:  # in this order
            self._members.setdefault(name, [])
        rest = "}"
        for name in reversed(names):
            value = self._sample(_member(merged, name)) or ""
            self._members[name].append(Member(name, value, rest, name in required))
            if name in required:
                rest = f",{_encoder.encode(name)}:{value}{rest}" if value and rest else ""
                rest = rest if len(rest) < MOST_CHARACTERS else ""

    # samples

    def _sample(self, schema: Any) -> str | None:
        """Returns about the shortest instance; None if none is known."""
        key = id(schema)
        if key in self._samples:
            return self._samples[key]
        if key in self._open or len(self._open) > MOST_DEPTH or self._looks < 0:
            return None  # a recursion that has no end here
        self._looks -= 1
        self._open.add(key)
        sample = _shortest(self._instance(merged) for merged in self._merged(schema, MOST_DEPTH))
        self._open.remove(key)
        if sample is not None or not self._open:  # elsewhere the recursion may have an end
            self._samples[key] = sample
        return sample

    def _merged(self, schema: Any, depth: int) -> list[dict[str, Any]]:
        """Returns the schema with all that it applies to the same value, once for each of its
        alternatives."""
        if not isinstance(schema, Mapping):
            return [{}] * (schema is not False)
        alternatives = [{key: value for key, value in schema.items() if key not in _APPLIED}]
        if not depth or len(alternatives[0]) == len(schema):
            return alternatives
        applied = [[part] for part in schema.get("allOf", ())]
        target = self._view.referred(schema)
        applied += [[target.schema]] if target else []
        applied += [schema[key] for key in ("anyOf", "oneOf") if key in schema]
        for options in applied:
            self._looks -= 1
            parts = (
                part
                for option in options[:MOST_ALTERNATIVES]
                for part in self._merged(option, depth - 1)
            )
            joined = (_joined(one, part) for part in parts for one in alternatives)
            alternatives = list(islice(joined, MOST_ALTERNATIVES)) if self._looks > 0 else []
        return alternatives

    def _instance(self, schema: Schema) -> str | None:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            return _shortest(map(_encoder.encode, values))
        return _shortest(self._of_type(schema, type) for type in sorted(named(schema)))

    def _of_type(self, schema: Schema, type: str) -> str | None:
        match type:
            case "integer" | "number":
                return _number(schema)
            case "string":
                return _encoder.encode(_string(schema))
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
        return {"null": "null"}.get(type, "true")

    def _array(self, schema: Schema) -> str | None:
        items, first = schema.get("items", True), schema.get("prefixItems", ())
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems", True)
        least = min(int(schema.get("minItems", 0)), MOST_CHARACTERS)
        samples = [self._sample(each) for each in first[:least]]
        samples += [self._sample(items)] * (least - len(samples)) if least > len(samples) else []
        return _listed("[", samples, "]")

    def _object(self, schema: Schema) -> str | None:
        required = _required(schema)
        names = [name for name in schema.get("properties", ()) if name in required]
        names += [name for name in required if name not in names]
        more = max(0, int(schema.get("minProperties", 0)) - len(names))
        others = [name for name in schema.get("properties", ()) if name not in names]
        names += [*others, *(f"a{n}" for n in range(more))][:more]
        values = [self._sample(_member(schema, name)) for name in names]
        members = zip(names, values, strict=True)
        return _listed("{", [v and f"{_encoder.encode(name)}:{v}" for name, v in members], "}")

    # proposals

    def proposals(self, text: JsonText) -> Iterator[str]:
        """Yields what may come next on the way to the end, the most promising first."""
        if text.begun is not None:
            return self._in_string(text.key, text.begun.decode("utf-8", "ignore"))
        if not text.last or text.last in b"[:":
            return self._values(text)
        return self._after_value(text) if text.last not in b"{," else self._after_comma(text)

    def _in_string(self, name: str, begun: str) -> Iterator[str]:
        yield '"'
        samples = dict.fromkeys([*(member.value for member in self._named(name)), *self._strings])
        for sample in samples:
            if sample.startswith('"') and len(sample) > 2:
                yield sample[1 + len(begun) :]
                least = max(1, len(sample) - MOST_PROPOSED)
                yield from (sample[at:] for at in range(len(sample) - 2, least - 1, -1))
        texts = chain(self._further(name, ""), self._words)
        words = (text for text in texts if text.startswith(f'"{begun}'))
        yield from (word[1 + len(begun) :] for word in islice(words, MOST_PROPOSED))
        yield from CHARACTERS

    def _values(self, text: JsonText) -> Iterator[str]:
        yield from "]" * (text.last == b"[")
        if text.last == b":":
            yield from (member.value for member in self._named(text.key))
        else:
            yield from self.roots
            yield from self._items
        yield from VALUES
        yield from islice(self._words, MOST_PROPOSED)

    def _after_comma(self, text: JsonText) -> Iterator[str]:
        """Yields what may come after a comma, or at the beginning of an object."""
        yield from "}" * (text.last == b"{")
        yield from self._further(text.key, "")
        yield from self._values(text)

    def _after_value(self, text: JsonText) -> Iterator[str]:
        """Yields what may come after a value or within a number, and after a name."""
        yield from "}]"
        yield from (member.rest for member in self._named(text.key))
        further = self._further(text.key, ",")
        yield from chain(":", further) if text.last == b'"' else islice(further, MOST_ALTERNATIVES)
        # zeros after a point may have no end
        digits = DIGITS[1:] + DIGITS[:1] if text.last in b".0" else DIGITS
        yield from chain(",", self._multiples(text.number), digits, ".-", LITERALS, further)

    def _multiples(self, number: bytes) -> Iterator[str]:
        """Yields digits with which the number becomes a multiple."""
        whole, point, decimals = number.partition(b".")
        if (whole + decimals).isdigit():
            for step, more in product(islice(self._steps, MOST_ALTERNATIVES), range(1, MOST_MORE)):
                lacking = -int(whole + decimals) * 10**more % (step * 10 ** (len(decimals) + more))
                if lacking.denominator == 1 and bool(point) <= lacking < 10**more:
                    yield f"{lacking.numerator:0{more}}"

    def _further(self, key: str, comma: str) -> Iterator[str]:
        """Yields members, those first that are required and come next in the schema."""
        names = [*self._members]
        at = names.index(key) + 1 if key in self._members else 0
        members = [m for name in (*names[at:], *names[:at]) for m in self._members[name]]
        for member in islice((m for m in members if m.required), MOST_PROPOSED):
            yield f"{comma}{member.key}{member.value}"
            yield f"{comma}{member.key}"
        others = islice((m for m in members if not m.required), MOST_PROPOSED)
        yield from (f"{comma}{member.key}{member.value}" for member in others)

    def _named(self, name: str) -> list[Member]:
        return self._members.get(name, [])[:MOST_ALTERNATIVES]


def _inside(root: Any) -> list[Schema]:
    """Returns the objects inside a schema, most of which are schemas."""
    objects, waiting = list[Schema](), [root]
    while waiting and len(objects) < MOST_SCHEMAS:
        value = waiting.pop()
        if isinstance(value, dict):
            objects.append(value)
            waiting += reversed(value.values())
        elif isinstance(value, list):
            waiting += reversed(value)
    return objects


def _shortest(texts: Iterable[str | None]) -> str | None:
    return min((text for text in texts if text is not None), key=len, default=None)


def _listed(opening: str, texts: Sequence[str | None], closing: str) -> str | None:
    known = [text for text in texts if text is not None]
    size = sum(map(len, known))
    return (
        f"{opening}{','.join(known)}{closing}"
        if len(known) == len(texts) and size < MOST_CHARACTERS
        else None
    )


def _joined(one: Schema, other: Schema) -> dict[str, Any]:
    """Returns a schema of what follows both, as far as samples need it."""
    properties = {**one.get("properties", {}), **other.get("properties", {})}
    required = [*_required(one), *_required(other)]
    return {
        **one,
        **other,
        **({"properties": properties} if properties else {}),
        "required": required,
    }


def _required(schema: Schema) -> list[str]:
    return [*dict.fromkeys(schema.get("required", ()))]


def _member(schema: Schema, name: str) -> Any:
    listed = schema.get("properties", {})
    return listed[name] if name in listed else schema.get("additionalProperties", True)


def _number(schema: Schema) -> str:
    """Returns a number within the bounds, as far as whole numbers and steps go."""
    lows = [schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema]
    highs = [schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema]
    least, most = max([-math.inf, *lows]), min([math.inf, *highs])
    near = 0 if least <= 0 <= most else math.ceil(least) if least > 0 else math.floor(most)
    step = schema.get("multipleOf", 1)
    is_open = near in (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"))
    near += is_open * (1 if near == least and least < most - 1 else 0)
    whole = Fraction(str(step)) * math.ceil(near / Fraction(str(step)))
    return str(whole.numerator if whole.denominator == 1 else near)


def _string(schema: Schema) -> str:
    pattern, least = schema.get("pattern"), min(int(schema.get("minLength", 0)), MOST_CHARACTERS)
    text = FORMATS.get(str(schema.get("format")), "") if pattern is None else sample_of(pattern)
    return text + "a" * (least - len(text))


# patterns


@lru_cache(256)
def sample_of(pattern: str) -> str:
    """Returns about the shortest text that matches a regular expression; of what is not read here
    nothing."""
    return _alternatives(PIECE.finditer(without_nested_classes(pattern)))


def _alternatives(pieces: Iterator[re.Match[str]]) -> str:
    """Reads the alternatives up to the end of the group."""
    options = [[""]]
    for piece in pieces:
        if piece["close"]:
            break
        if piece["other"] == "|":
            options.append([""])
        elif piece["open"]:
            options[-1].append(_alternatives(pieces))
        elif piece["many"] or piece["times"]:
            times = int(piece["least"]) if piece["times"] else int(piece["many"] == "+")
            options[-1][-1] *= min(times, MOST_CHARACTERS // (1 + len(options[-1][-1])))
        else:
            options[-1].append(_single(piece))
    return min(map("".join, options), key=len)


def _single(piece: re.Match[str]) -> str:
    if piece["class"]:
        try:
            class_ = re.compile(piece["class"], re.ASCII)
        except re.error:
            return ""
        return next((c for c in CHARACTERS if class_.fullmatch(c)), "")
    if piece["escape"]:
        return _ESCAPES.get(piece["escape"], piece["escape"][1:])
    return {"^": "", "$": "", ".": "a"}.get(piece["other"], piece["other"])
