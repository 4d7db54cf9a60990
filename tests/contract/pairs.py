"""What a request may ask, every pair of it in some request, and what must then be true.

A replay model here never follows instructions: what it keeps to, a grammar enforces.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import jsonschema

from mlx_server.families import FAMILIES as KNOWN
from mlx_server.families import family_named
from mlx_server.families.base import ModelFamily
from mlx_server.messages import Message, ToolCall
from mlx_server.parsers.harmony_grammar import FINAL, NEXT, REASONING
from mlx_server.parsers.markup_grammar import STRAY_DELIMITERS
from mlx_server.requests import ChoiceFormat as ChoiceFormat
from mlx_server.requests import Format, GrammarFormat, JsonFormat, RegexFormat
from mlx_server.sources.transcript import write_answer
from tests.contract.answers import Answer, Completion
from tests.families.goldens import tokenizer_of
from tests.grammars.matching import matcher_of, matches
from tests.live.server import SHALLOW

ADAPTED = f"{SHALLOW}:other"
WITHOUT_CALLS = ("gemma3", "harmony_text")
"""Families that no grammar can make call a tool."""


def _kind(family: ModelFamily) -> tuple[object, ...]:
    """What a grammar and a parser are made of: families of one kind differ in their delimiters."""
    layout = family.layout_with()
    blocks = (type(block) for each in layout.call_formats for block in each.blocks)
    reasons = bool(family.thinking_delimiters()[0])
    return (thinks(family), reasons, layout.calls_end_reasoning, layout.trims, *blocks)


def thinks(family: ModelFamily) -> bool:
    """Whether its vocabulary knows how: others, once constrained, answer at once."""
    opens, _ = family.thinking_delimiters()
    return any(token in mark for token in family.special_tokens for mark in opens)


WITH_CALLS = [family for family in KNOWN if family.name not in WITHOUT_CALLS]
_FIRST = {_kind(family): family.name for family in reversed(WITH_CALLS)}
FAMILIES = tuple(_FIRST.values())
"""The first of each kind."""
PAIRED = tuple(
    {
        (*kind[:4], *sorted({str(block) for block in kind[4:]})): name
        for kind, name in _FIRST.items()
    }.values()
)
"""The first of those that differ in more than how many kinds of calls they may write, which is
tried in all of KINDS without a server."""
KINDS = (*FAMILIES, *WITHOUT_CALLS)
"""For what goes the same way in all families of a kind."""
THOUGHT = "Let me see, step by step. "
SAID = "It is 7 o'clock ~ or 77."
"""What a model says that is held to nothing."""


def script(name: str, thought: str = THOUGHT) -> str:
    """A family's answer: its reasoning, if it has any, and its text."""
    family = family_named(name)
    if name == "gpt_oss":
        return f"{REASONING}{thought}{NEXT}{FINAL}{SAID}"
    opens, closes = family.thinking_delimiters()
    return f"{opens[0]}{thought}{closes[0]}{SAID}" if opens else SAID


def entry(name: str, thought: str = THOUGHT) -> dict[str, str]:
    """Of a transcript: it plays the script where it may, and else whatever it may."""
    return {"output": script(name, thought), "off_grammar": "noise"}


Check = Callable[["Row", Completion], None]


@dataclass(frozen=True)
class Value:
    """Of one of the dimensions: what is asked, and whether an answer is so."""

    name: str
    body: Mapping[str, Any] = field(default_factory=dict)
    check: Check = lambda row, found: None
    format: Format | None = None


@dataclass(frozen=True)
class Row:
    values: tuple[Value, ...]

    @property
    def name(self) -> str:
        return ", ".join(value.name for value in self.values if value.name)

    @property
    def model(self) -> str:
        found: str = self.values[0].body["model"]
        return found

    def body(self, banned: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """banned: for each model, the tokens in which BANNED stands."""
        said: dict[str, Any] = {"messages": [{"role": "user", "content": "Well?"}]}
        said["max_tokens"] = LIMIT if self.model in FAMILIES else SHALLOW_LIMIT
        for value in self.values:
            said |= value.body
        if self.has("bias"):
            said["logit_bias"] = dict.fromkeys(map(str, banned[self.model]), -100)
        return said

    @property
    def thinks(self) -> bool:
        return self.model in FAMILIES and thinks(family_named(self.model))

    def has(self, name: str) -> bool:
        return any(value.name == name for value in self.values)

    @property
    def format(self) -> Format | None:
        return next((value.format for value in self.values if value.format), None)

    @property
    def must_call(self) -> bool:
        return self.has("required") or self.has("named")

    def check(self, found: Completion) -> None:
        for value in self.values:
            value.check(self, found)


def all_pairs(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Rows of one value per dimension: any two values of two dimensions stand in one of them."""
    places = combinations(range(len(sizes)), 2)
    left = {
        ((a, i), (b, j)): None
        for a, b in places
        for i, j in product(range(sizes[a]), range(sizes[b]))
    }
    while left:
        row = dict(next(iter(left)))
        for at in sorted(set(range(len(sizes))) - row.keys(), key=lambda at: -sizes[at]):

            def covers(value: int, at: int = at, row: dict[int, int] = row) -> int:
                pairs = (tuple(sorted([(at, value), other])) for other in row.items())
                return sum(pair in left for pair in pairs)

            turn = len(left)  # of those that cover alike, not always the same
            row[at] = max(range(sizes[at]), key=lambda v: (covers(v), (v + turn) % sizes[at]))
        for pair in combinations(sorted(row.items()), 2):
            left.pop(pair, None)
        yield tuple(row[at] for at in range(len(sizes)))


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "why": {"type": "string"}},
    "required": ["ok"],
    "additionalProperties": False,
}
PATTERN = r"[A-Z]{2}-\d{3,5}"
OPTIONS = ("yes", "no", "perhaps so")
LARK = 'start: "a"+ "b"'

PARAMETERS: dict[str, dict[str, Any]] = {
    "look": {
        "type": "object",
        "properties": {"at": {"enum": ["here", "there"]}},
        "required": ["at"],
    },
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a"],
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
STOP = "~"
ROOM = 140
"""Tokens in which any of the formats and calls can be written, byte by byte."""
LIMIT, SHALLOW_LIMIT = 180, 70
OPENING = 12
"""Tokens of an answer before its first output, which no limit counts: white space. `opening_of` has
what the family writes there."""
BUDGET = 7
TORN = len("</think>")
"""Tokens of a mark that is text, most of which come before it is known for one."""
BANNED = "7"


def each(check: Callable[["Row", Answer], None]) -> Check:
    def of_all(row: Row, found: Completion) -> None:
        for answer in found.answers:
            check(row, answer)

    return of_all


def is_so(is_whole: Callable[[str], bool]) -> Check:
    """Where text is answered at all, it is as asked, or the beginning of it: a stop string may end
    any text, and the limit a text of a grammar that has no bound."""

    def check(row: Row, answer: Answer) -> None:
        if answer.calls or row.must_call:
            return
        assert row.format
        may_be_cut = isinstance(row.format, GrammarFormat) and answer.finish == "length"
        if may_be_cut or (row.has("stop") and not is_whole(answer.text)):
            assert begins(row.format, answer.text), answer
        else:
            assert answer.finish == "stop", answer
            assert is_whole(answer.text), answer

    return each(check)


def begins(format: Format, text: str) -> bool:
    """Whether it may be cut there, a stop string that it spelled aside."""
    matcher = matcher_of(format).deep_copy()
    given = list(text.encode())
    return matcher.try_consume_tokens(given) == len(given)


def follows(schema: Mapping[str, Any]) -> Callable[[str], bool]:
    def is_whole(text: str) -> bool:
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True

    return is_whole


def is_in(format: Format) -> Callable[[str], bool]:
    return lambda text: matches(matcher_of(format), text)


def calls_are_valid(row: Row, answer: Answer) -> None:
    is_cut = answer.finish == "length"  # in one more call, or before one
    for at, (name, arguments) in enumerate(answer.calls, 1):
        closed = {**PARAMETERS[name], "additionalProperties": False}
        try:
            jsonschema.validate(json.loads(arguments), closed)
        except ValueError:
            # only a stream has the call in which it was cut
            assert is_cut, answer
            assert row.has("stream"), answer
            assert at == len(answer.calls), answer
            assert begins(JsonFormat(closed), arguments), answer
    assert is_cut or (answer.finish == "tool_calls") == bool(answer.calls), answer


def has_called(row: Row, answer: Answer) -> None:
    assert answer.calls, answer
    assert not answer.text.strip(), answer
    calls_are_valid(row, answer)


def has_called_once(name: str) -> Callable[[Row, Answer], None]:
    def check(row: Row, answer: Answer) -> None:
        has_called(row, answer)
        assert [called for called, _ in answer.calls] == [name], answer

    return check


def has_not_called(row: Row, answer: Answer) -> None:
    assert not answer.calls, answer
    assert answer.finish != "tool_calls", answer


def thought(tokens: int | None) -> Check:
    """As far as it was let, and no mark of it in what is seen."""

    def check(row: Row, found: Completion) -> None:
        for answer in found.answers:
            said = answer.reasoning.strip()
            may_go_on = row.model == "gpt_oss" and row.must_call  # it has messages of it
            assert THOUGHT.startswith(said) or (may_go_on and said.startswith(THOUGHT)), answer
            if tokens is None and row.thinks:
                assert said.startswith(THOUGHT.strip()), answer
        if tokens is not None:
            spared = len(found.answers) * (tokens if row.thinks else TORN + tokens)
            assert found.reasoning_tokens <= spared, (found.reasoning_tokens, row.name)
            if row.thinks:
                assert found.reasoning_tokens == spared, (found.reasoning_tokens, row.name)

    return check


def is_short(row: Row, found: Completion) -> None:
    opening = opening_of(family_named(row.model)) if row.model in FAMILIES else ""
    most = len(found.answers) * (ROOM + OPENING + len(opening))
    assert found.tokens - found.reasoning_tokens <= most, found.usage


def opening_of(family: ModelFamily) -> str:
    """The longest text before an answer's first output: what leads from reasoning to it, and stray
    delimiters or a call from its block's opening delimiter up to the end of its name."""
    call = Message("assistant", tool_calls=(ToolCall("call_0", "look", '{"at": "here"}'),))
    written = write_answer(family, tokenizer_of(family.name), call)
    before, name, _ = written.partition("look")
    stray = max(family.layout_with().dropped, key=len, default="") * STRAY_DELIMITERS
    return family.answer_prefix + max(stray, before + name, key=len)


def has_logprobs(tops: int) -> Check:
    def check(row: Row, answer: Answer) -> None:
        assert answer.logprobs is not None
        spelled = bytes(byte for entry in answer.logprobs for byte in entry["bytes"])
        text = spelled.decode("utf-8", "replace").strip()
        if row.has("stop"):
            assert text.startswith(answer.text.strip()), answer
        else:
            assert text == answer.text.strip(), answer
        for entry in answer.logprobs:
            assert entry["logprob"] <= 1e-6
            others = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(others) == tops
            assert others == sorted(others, reverse=True)

    return each(check)


def has_no_logprobs(row: Row, answer: Answer) -> None:
    assert answer.logprobs is None


def does_not_say(text: str) -> Check:
    def check(row: Row, answer: Answer) -> None:
        assert text not in answer.text, answer

    return each(check)


def is_n(n: int) -> Check:
    def check(row: Row, found: Completion) -> None:
        assert len(found.answers) == n
        assert all(answer.finish for answer in found.answers)

    return check


def json_schema(schema: Mapping[str, Any], *, strict: bool) -> Value:
    wanted = {"name": "a", "schema": schema, "strict": strict}
    return Value(
        "json_schema" if strict else "json_schema, not strict",
        {"response_format": {"type": "json_schema", "json_schema": wanted}},
        is_so(follows(schema)),
        JsonFormat(schema, strict),
    )


def formatted(name: str, asked: Mapping[str, Any], format: Format) -> Value:
    return Value(name, asked, is_so(is_in(format)), format)


def structured(**asked: Any) -> dict[str, Any]:
    return {"structured_outputs": asked}


def calling(name: str, choice: Any, check: Callable[[Row, Answer], None], **more: Any) -> Value:
    return Value(name, {"tools": TOOLS, "tool_choice": choice, **more}, each(check))


NAMED = {"type": "function", "function": {"name": "look"}}
FORMATS = (
    json_schema(SCHEMA, strict=True),
    formatted("json_object", {"response_format": {"type": "json_object"}}, JsonFormat()),
    formatted("regex", structured(regex=PATTERN), RegexFormat(PATTERN)),
    formatted("choice", {"guided_choice": OPTIONS}, ChoiceFormat(OPTIONS)),
    formatted("grammar", structured(grammar=LARK), GrammarFormat(LARK)),
)


DIMENSIONS = (
    [Value(name, {"model": name}) for name in (*PAIRED, SHALLOW, ADAPTED)],
    [Value(""), *FORMATS],
    [
        Value(""),
        calling("auto", "auto", calls_are_valid),
        calling("required", "required", has_called),
        calling("named", NAMED, has_called_once("look")),
        calling("none", "none", has_not_called),
    ],
    [
        Value("", check=thought(None)),
        Value("no thinking", {"thinking_budget": 0}, thought(0)),
        Value("budget", {"thinking_budget": BUDGET}, thought(BUDGET)),
    ],
    [Value(""), Value("room", {"max_response_tokens": ROOM}, is_short)],
    [Value(""), Value("seed", {"seed": 5})],
    [
        Value("", check=each(has_no_logprobs)),
        Value("logprobs", {"logprobs": True}, has_logprobs(0)),
        Value("top_logprobs", {"logprobs": True, "top_logprobs": 3}, has_logprobs(3)),
    ],
    [Value(""), Value("stop", {"stop": [STOP, "###"]}, does_not_say(STOP))],
    [Value(""), Value("penalties", {"presence_penalty": 0.4, "frequency_penalty": 0.2})],
    [Value(""), Value("bias", check=does_not_say(BANNED))],
    [Value("", check=is_n(1)), Value("n", {"n": 2}, is_n(2))],
    [Value(""), Value("stream", {"stream": True})],
    [Value("greedy", {"temperature": 0}), Value("", {"temperature": 1})],
)


def rows() -> list[Row]:
    """By model, so that those of one model are asked at a time and share its batches."""
    table = all_pairs([len(values) for values in DIMENSIONS])
    found = (zip(DIMENSIONS, row, strict=True) for row in table)
    rows = (Row(tuple(values[at] for values, at in row)) for row in found)
    return sorted(rows, key=lambda row: row.model)


ALIKE = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "structured_outputs.json": SCHEMA,
    "structured_outputs.regex": PATTERN,
    "structured_outputs.choice": OPTIONS,
    "structured_outputs.grammar": LARK,
    "guided_json": SCHEMA,
    "guided_regex": PATTERN,
    "guided_choice": OPTIONS,
    "guided_grammar": LARK,
}
"""Each says all of what an answer has to be: any two of them contradict each other."""
