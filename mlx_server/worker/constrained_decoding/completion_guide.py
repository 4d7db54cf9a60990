"""What may complete a text of a grammar, read off the grammar's source before any row uses it.

These are token sequences: the shortest instances of a schema's parts, the ends of texts that a
pattern requires, a grammar's literals. The search (ending_search.py) tries them where a row stands.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mlx_server.schemas.regex_tails import regex_tails
from mlx_server.schemas.shortest import ShortestInstances, compact, patterns_of
from mlx_server.worker.constrained_decoding.token_classes import SHORT_VALUES, TokenClasses

Ways = list[list[int]]
"""Token sequences, the shortest first."""

MOST_WAYS = 1_500
"""Sequences of a kind, at most."""
MOST_SUFFIXES = 64
"""Suffixes of one literal that are proposed, at most."""
LITERAL_SUFFIXES = 16
"""Characters at the end of a rule's literal that are proposed, as free text may lead into it."""
MOST_TOKENS = 4_000
"""A longer sequence is not proposed."""
CALL_TOKENS = 128
"""Tokens that a grammar's own literals add to what a single token may begin, at most."""

_JSON = re.compile(r"%json\s*")
_CONTROL = re.compile(r"<\[(\d+)\]>")
_FRAMED = re.compile(r'<\[(\d+)\]> ("(?:[^"\\]|\\.)+") <\[(\d+)\]>')
_PIECE = re.compile(r'/((?:[^/\\\n]|\\.)+)/|("(?:[^"\\\n]|\\.)+")')


@dataclass(frozen=True)
class CompletionGuide:
    whole: Ways = field(default_factory=list)
    """Instances of whole schemas, which are objects or arrays."""
    values: Ways = field(default_factory=list)
    """JSON values, which stand where a value is expected."""
    following: Ways = field(default_factory=list)
    """A comma with a member or an item after it."""
    members: Ways = field(default_factory=list)
    tails: Ways = field(default_factory=list)
    """What ends a text: the rest of a pattern, a name or a constant, with its quote."""
    numbers: Ways = field(default_factory=list)
    """Digits that may complete a number."""
    controls: Ways = field(default_factory=list)
    """Control tokens of the grammar's own rules."""
    literals: Ways = field(default_factory=list)
    """Texts of the grammar's own rules, and what ends its expressions."""
    growth: int = 0
    """By how many tokens a single token may lengthen the shortest ending."""
    reserve: int = 0
    """By how many tokens one more token of a text may lengthen what its pattern still requires."""


def guide_of(grammar: str, classes: TokenClasses) -> CompletionGuide:
    """grammar: its source in Lark."""
    schemas, own = _parts(grammar)
    texts = _Texts()
    for schema in schemas:
        # proposals only: what can't be read of a client's schema is left out
        with suppress(ArithmeticError, AttributeError, RecursionError, TypeError, ValueError):
            texts.add_schema(schema)
    framed, literals = _controls(own, classes), list(_literals(own))
    expressions = [end for end in _expression_tails(own) if end]
    ways = {
        name: _ways(found, classes)
        for name, found in (
            *(("whole", texts.whole), ("values", texts.values), ("members", texts.members)),
            *(("following", texts.following), ("tails", texts.tails), ("numbers", texts.numbers)),
        )
    }
    suffixes = {text[-size:] for text in literals for size in range(1, LITERAL_SUFFIXES)}
    spelled = [*_ways(literals, classes), *_ways([*suffixes, *expressions], classes)]
    spelled.sort(key=lambda way: all(classes.texts[id].isspace() for id in way))
    begun = sum(map(len, _ways(literals, classes))) + len(framed)
    largest = max((len(way) for name in ("values", "following") for way in ways[name]), default=0)
    of_texts = (len(way) for way in (*ways["tails"], *_ways(expressions, classes)))
    return CompletionGuide(
        **ways,
        controls=framed,
        literals=spelled,
        growth=largest + min(begun, CALL_TOKENS),
        reserve=max(of_texts, default=0),
    )


def _parts(grammar: str) -> tuple[list[Any], str]:
    """The schemas in a grammar, and the rest of its source."""
    schemas, rest, at = [], [], 0
    for found in _JSON.finditer(grammar):
        if found.start() < at:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue
        schemas.append(schema)
        rest.append(grammar[at : found.start()])
        at = end
    return schemas, "".join([*rest, grammar[at:]])


class _Texts:
    def __init__(self) -> None:
        self.whole: list[str] = []
        self.values = {text.decode() for text in SHORT_VALUES}
        self.members: set[str] = set()
        self.following: set[str] = set()
        self.tails: set[str] = {'"', '":'}
        self.numbers = {"0" * n for n in range(1, 18)} | {".0", "e0", "1"}

    def add_schema(self, schema: Any) -> None:
        instances = ShortestInstances(schema)
        root = instances.text(schema)
        self.whole += [root] if root and root[0] in "{[" else []
        for one in instances.schemas:
            self._add(one, instances.text(one))
        for name, value in instances.members():
            written = compact(name)
            self.tails |= {f"{end}:" for end in _suffixes(written)}
            if value is not None:
                self.members.add(f"{written}:{value}")
                self.following.add(f",{written}:{value}")

    def _add(self, schema: Any, instance: str | None) -> None:
        if instance is not None:
            self.values.add(instance)
            self.following.add(f",{instance}")
        for tails in patterns_of(schema):
            self.tails |= {compact(tail)[1:] for tail in tails.tails}
        constants = [schema["const"]] if "const" in schema else schema.get("enum") or ()
        for constant in islice(constants, MOST_WAYS):
            self.tails.update(_suffixes(compact(constant)))
            self.values.add(compact(constant))
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            bound = schema.get(key, False)
            if not isinstance(bound, bool) and isinstance(bound, int | float):
                near = [bound, bound + 1, bound - 1] if isinstance(bound, int) else [bound]
                self.numbers |= {
                    end for n in near for end in _suffixes(f"{n}") if end[0] in _DIGITS
                }


_DIGITS = ".0123456789"


def _suffixes(text: str) -> list[str]:
    return [text[at:] for at in range(1, min(len(text), MOST_SUFFIXES))]


def _ways(texts: Iterable[str], classes: TokenClasses) -> Ways:
    """The texts in tokens; of too many, the shortest ones."""
    some = sorted(set(texts), key=lambda text: (len(text), text))[:MOST_WAYS]
    cut = (classes.cut(text.encode("utf-8", "ignore")) for text in some)
    return sorted((way for way in cut if 0 < len(way) <= MOST_TOKENS), key=len)


def _controls(source: str, classes: TokenClasses) -> Ways:
    """Control tokens, and delimiters of a control token, a text and another control token."""
    found = dict.fromkeys(_FRAMED.findall(source))
    cut = [(int(b), classes.cut(_spelled(text).encode()), int(e)) for b, text, e in found]
    alone = [[int(id)] for id in dict.fromkeys(_CONTROL.findall(source))]
    return [*([begin, *way, end] for begin, way, end in cut if way), *alone]


def _literals(source: str) -> Iterator[str]:
    """The texts that the grammar's rules spell out."""
    for _, text in _PIECE.findall(_rules(source)):
        if spelled := _spelled(text) if text else "":
            yield spelled


def _expression_tails(source: str) -> Iterator[str]:
    for pattern, _ in _PIECE.findall(_rules(source)):
        if pattern and (found := regex_tails(pattern.replace(r"\/", "/"))):
            yield from sorted(found.tails)


def _rules(source: str) -> str:
    return "\n".join(line for line in source.splitlines() if not line.startswith("%"))


def _spelled(text: str) -> str:
    """Decodes a Lark string; returns "" where a client used an escape that JSON does not have."""
    try:
        found: str = json.loads(text)
        found.encode()
    except ValueError:
        return ""
    return found
