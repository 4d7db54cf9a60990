"""What may complete a text of a grammar, read off the grammar's source before any row uses it.

These are token sequences: the shortest instances of a schema's parts, the ends of texts that a
pattern requires, a grammar's literals. The search (ending_search.py) tries them where a row stands.
"""

import json
import re
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from mlx_server.schemas.instance_texts import MOST_TEXTS, InstanceTexts
from mlx_server.schemas.regex_tails import regex_tails
from mlx_server.worker.constrained_decoding.frame_tails import Spelled, frame_tails, spelled_text
from mlx_server.worker.constrained_decoding.token_classes import SHORT_VALUES, TokenClasses

_Text = TypeVar("_Text", str, bytes, list[int])

TokenSequences = list[list[int]]
"""Token sequences, the shortest first."""

MOST_STATES = 256
"""The most results of `without` that are kept, by the set of excluded bytes."""
MOST_ENDINGS = 256
"""The most endings of the whole answer that are tried in one place."""
LITERAL_SUFFIXES = 16
"""Suffixes of a rule's literal with fewer characters than this are proposed too, as free text may
lead into the literal."""
CALL_TOKENS = 128
"""The most tokens by which a grammar's own literals raise what a single token may add to an
ending."""

_JSON = re.compile(r"%json\s*")
_CONTROL = re.compile(r"<\[(\d+)\]>")
_FRAMED = re.compile(r'<\[(\d+)\]> ("(?:[^"\\]|\\.)++") <\[(\d+)\]>')
_PIECE = re.compile(r'//.*|/((?:[^/\\\n]|\\.)+)/?|("(?:[^"\\\n]|\\.)+"?)')
"""Matches expressions and texts, those too that have no end, so that no place is read twice."""


class TextProposals:
    """Texts that may lead closer to an end, the shortest first.

    A text is cut into tokens when it is first tried, as most texts never are.
    """

    def __init__(self, classes: TokenClasses, texts: Iterable[str] = ()) -> None:
        self._classes = classes
        self._tokens: dict[bytes, list[int]] = {}
        spelled = {_bytes(text) for text in texts} - {b""}
        self._texts = _shortest(spelled)
        self.bytes = frozenset(text[0] for text in self._texts)
        """The first bytes of the texts."""
        self._beginning: dict[AbstractSet[int], list[bytes]] = {}

    def without(self, excluded: AbstractSet[int]) -> list[bytes]:
        """Returns the texts whose first byte is none of these."""
        if excluded not in self._beginning:
            if len(self._beginning) >= MOST_STATES:
                self._beginning.clear()
            found = [text for text in self._texts if text[0] not in excluded]
            self._beginning[excluded] = found
        return self._beginning[excluded]

    def tokens(self, text: bytes) -> list[int]:
        if text not in self._tokens:
            self._tokens[text] = self._classes.cut(text)
        return self._tokens[text]

    @property
    def longest(self) -> bytes:
        return self._texts[-1] if self._texts else b""


class FrameEndings:
    """Texts that end the whole answer from a position in the rules, the shortest first."""

    def __init__(self, classes: TokenClasses, spelled: Spelled, texts: Iterable[str] = ()) -> None:
        self._classes = classes
        self._spelled = spelled
        self._tokens: dict[str, list[int]] = {}
        self._controlled: list[str] = []
        """The proposals that begin with a control token."""
        self._by_byte: dict[int, list[str]] = {}
        self._beginning: dict[AbstractSet[int], list[str]] = {}
        for text in sorted(texts, key=_by_length):
            match spelled.parts(text)[:1]:
                case [int()]:
                    self._controlled.append(text)
                case [str(first)] if spelt := _bytes(first):
                    self._by_byte.setdefault(spelt[0], []).append(text)
        self.bytes = frozenset(self._by_byte)
        """The first bytes of the texts that begin with no control token."""

    def after_control(self) -> Iterator[list[int]]:
        """Returns the proposals that begin with a control token."""
        return map(self._cut, self._controlled[:MOST_ENDINGS])

    def without(self, excluded: AbstractSet[int]) -> Iterator[list[int]]:
        """Returns the proposals whose first byte is not excluded, and those that begin with a
        control token."""
        if excluded not in self._beginning:
            if len(self._beginning) >= MOST_STATES:
                self._beginning.clear()
            some = (texts for byte, texts in self._by_byte.items() if byte not in excluded)
            found = sorted(chain(self._controlled, *some), key=_by_length)
            self._beginning[excluded] = found[:MOST_ENDINGS]
        return map(self._cut, self._beginning[excluded])

    def _cut(self, text: str) -> list[int]:
        if text not in self._tokens:
            found: list[int] = []
            for part in self._spelled.parts(text):
                one = [part] if isinstance(part, int) else self._classes.cut(_bytes(part))
                found = [*found, *one] if one else []
                if not one:  # the vocabulary can't spell it
                    break
            self._tokens[text] = found
        return self._tokens[text]


def _shortest(texts: AbstractSet[bytes]) -> list[bytes]:
    """Returns the shortest texts in order; the order is the same in every process."""
    if len(texts) > MOST_TEXTS:
        most = sorted(map(len, texts))[MOST_TEXTS - 1]
        texts = {text for text in texts if len(text) <= most}
    return sorted(sorted(texts), key=len)[:MOST_TEXTS]


def _by_length(text: _Text) -> tuple[int, _Text]:
    """Orders texts in full: the order of a set of them differs from process to process."""
    return len(text), text


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "ignore")


@dataclass(frozen=True)
class CompletionProposals:
    endings: FrameEndings
    values: TextProposals
    """JSON values, which stand where a value is expected."""
    required: TextProposals
    """A comma with a required member after it."""
    following: TextProposals
    """A comma with another member or an item after it."""
    members: TextProposals
    tails: TextProposals
    """The ends of a text: the rest of a pattern, a name or a constant, with its quote."""
    numbers: TextProposals
    """Digits that may complete a number."""
    own: TokenSequences = field(default_factory=list)
    """Control tokens and texts of the grammar's own rules, and what ends its expressions."""
    growth: int = 0
    """The number of tokens by which a single token may lengthen the shortest ending."""
    width: int = 0
    """The number of members of the object that lists the most."""
    reserve: int = 0
    """The number of tokens by which one more token of a text may lengthen the rest that its pattern
    requires."""


def proposals_of(grammar: str, classes: TokenClasses) -> CompletionProposals:
    """grammar: its source in Lark."""
    schemas, own = _schemas_and_rules(grammar)
    texts = InstanceTexts(value.decode() for value in SHORT_VALUES)
    instances = [texts.add(schema) for schema in schemas]
    spelled = Spelled()
    frame = frame_tails(own, instances, spelled)
    values, required, following = (
        TextProposals(classes, found) for found in (texts.values, texts.required, texts.following)
    )
    members, tails, numbers = (
        TextProposals(classes, found) for found in (texts.members, texts.tails, texts.numbers)
    )
    literals, controls = list(_literals(own)), _controls(own, classes)
    expressions = TextProposals(classes, _expression_tails(own))
    longest = max((values.longest, required.longest, following.longest), key=len)
    begun = sum(len(classes.cut(text.encode())) for text in literals) + len(controls)
    return CompletionProposals(
        FrameEndings(classes, spelled, frame.tails if frame else ()),
        *(values, required, following, members, tails, numbers),
        own=[*controls, *_own_texts(literals, expressions, classes)],
        width=texts.width,
        growth=len(classes.cut(longest)) + min(begun, CALL_TOKENS),
        reserve=max(
            len(classes.cut(_bytes(texts.longest_tail))), len(classes.cut(expressions.longest))
        ),
    )


def _own_texts(
    literals: list[str], expressions: TextProposals, classes: TokenClasses
) -> TokenSequences:
    """Returns as tokens: the literals, their suffixes and the ends of the expressions. Those of
    blanks come last."""
    ends = {text[-size:].encode() for text in literals for size in range(1, LITERAL_SUFFIXES)}
    ends.update(expressions.without(frozenset()))
    whole = [classes.cut(text.encode()) for text in literals]
    sequences = [*sorted(whole, key=_by_length), *sorted(map(classes.cut, ends), key=_by_length)]
    return sorted(
        filter(None, sequences),
        key=lambda sequence: all(classes.texts[id].isspace() for id in sequence),
    )


def _schemas_and_rules(grammar: str) -> tuple[list[Any], str]:
    """Returns the schemas in a grammar, and the rest of its source with `@0` in place of the first
    schema."""
    schemas, rest, at = list[Any](), list[str](), 0
    for found in _JSON.finditer(grammar):
        if found.start() < at:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue
        rest.append(f"{grammar[at : found.start()]}@{len(schemas)}")
        schemas.append(schema)
        at = end
    return schemas, "".join([*rest, grammar[at:]])


def _controls(source: str, classes: TokenClasses) -> TokenSequences:
    """Returns control tokens, and delimiters of a control token, a text and another control
    token."""
    found = dict.fromkeys(_FRAMED.findall(source))
    cut = [(int(b), classes.cut(spelled_text(text).encode()), int(e)) for b, text, e in found]
    alone = [[int(id)] for id in dict.fromkeys(_CONTROL.findall(source))]
    return [*([begin, *sequence, end] for begin, sequence, end in cut if sequence), *alone]


def _literals(source: str) -> Iterator[str]:
    """Yields the texts that the grammar's rules contain literally."""
    for _, text in _PIECE.findall(_rules(source)):
        if spelled := spelled_text(text) if text else "":
            yield spelled


def _expression_tails(source: str) -> Iterator[str]:
    for pattern, _ in _PIECE.findall(_rules(source)):
        if pattern and (found := regex_tails(pattern.replace(r"\/", "/"))):
            yield from sorted(found.tails)


def _rules(source: str) -> str:
    return "\n".join(line for line in source.splitlines() if not line.startswith("%"))
