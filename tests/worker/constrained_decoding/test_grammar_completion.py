"""Whatever a model prefers to say, its JSON comes to an end before the limit, if it can."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from llguidance.numpy import fill_next_token_bitmask

from mlx_server.engine.messages import Grammar
from mlx_server.grammars.lark import Lark
from mlx_server.worker.constrained_decoding.grammar_completion import (
    STEP_CALLS,
    CompletionHints,
    GrammarCompletion,
    completion_hints,
)
from mlx_server.worker.constrained_decoding.mask_threads import YieldingMatcher
from tests.worker.constrained_decoding.worlds import (
    SCHEMAS,
    WIDE,
    WISHES,
    World,
    half,
    json_of,
    obj,
    say,
    walks,
)

PERSON = obj(name={"type": "string"}, age={"type": "integer"})


class Row:
    """A row that has said a text, and what may come next."""

    def __init__(self, world: World, grammar: Grammar, hints: CompletionHints, text: bytes) -> None:
        self.world = world
        self.matcher = YieldingMatcher(world.matcher(grammar))
        self.completion = GrammarCompletion(world.pieces, hints)
        for token in world.pieces.cut(text):
            self.say(token)

    def say(self, token: int) -> None:
        assert self.matcher.consume_token(token)
        self.completion.advance(token)

    def mask(self, left: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        mask = np.zeros((1, self.world.tree.vocab_size + 31 >> 5), dtype=np.int32)
        fill_next_token_bitmask(self.matcher.own, mask)
        self.completion.allow(mask[0], left, self.matcher)
        only: np.ndarray[Any, np.dtype[np.int32]] = mask[0]
        return only

    def allowed(self, left: int) -> set[bytes]:
        return {self.world.text[id] for id in self.world.allowed(self.mask(left))}

    def ending(self, left: int) -> bytes:
        self.mask(left)
        return b"".join(
            self.world.text[id] or self.world.control[id].encode()
            for id in self.completion.ending or ()
        )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wish"), half(SCHEMAS, list(WISHES)))
def test_json_comes_to_its_end(demo: World, name: str, wish: str) -> None:
    for said in walks(demo, SCHEMAS[name], wish):
        assert said.ended, said.text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wish"), half(SCHEMAS, ["opening", "text"]))
def test_with_a_token_for_each_byte(bytewise: World, name: str, wish: str) -> None:
    for said in walks(bytewise, SCHEMAS[name], wish):
        assert said.ended, said.text


EVERYDAY = (
    r"^[^@]+@[^@]+\.[^@]+$",
    "(foo|bar)",
    r"\d+\.\d+\.\d+",
    r"^\d{4}-\d{2}-\d{2}$",
    "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    ".*foo.*",
    r"^https?://[^\s/]+/.*$",
    r"^\+?[0-9 ()-]{7,20}$",
    "^(red|green|blue)( (red|green|blue))*$",
    r"^#[0-9a-fA-F]{6}$",
    r"^[\w.-]+@[\w-]+\.\w{2,4}$",
)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", EVERYDAY)
@pytest.mark.parametrize("wish", ["anything", "text"])
def test_everyday_patterns_come_to_their_end(
    demo: World, bytewise: World, pattern: str, wish: str
) -> None:
    schema = obj(v={"type": "string", "pattern": pattern})
    for world in (demo, bytewise):
        for said in walks(world, schema, wish):
            assert said.ended, said.text


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "name", "na", "items", "x y", "é"])
    members = st.dictionaries(names, inner, max_size=4)
    return members.flatmap(
        lambda listed: st.lists(st.sampled_from([*listed, "name"]), unique=True, max_size=3).map(
            lambda required: obj([name for name in required if name in listed], **listed)
        )
    )


_LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(EVERYDAY).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(["date", "date-time", "uuid", "email", "ipv4", "uri"]).map(
        lambda format: {"type": "string", "format": format}
    ),
    st.integers(0, 40).map(lambda least: {"type": "string", "minLength": least}),
    st.tuples(st.integers(-2000, 2000), st.integers(0, 3000)).map(
        lambda bounds: {"type": "integer", "minimum": bounds[0], "maximum": sum(bounds)}
    ),
    st.integers(-5, 5).map(lambda low: {"type": "number", "exclusiveMinimum": low}),
    st.sampled_from([{"enum": ["low", "lower", 3, None]}, {"type": "boolean"}, {"const": "x"}]),
)
RANDOM_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.tuples(inner, st.integers(0, 4)).map(
            lambda parts: {"type": "array", "items": parts[0], "minItems": parts[1]}
        ),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


@pytest.mark.slow
def test_few_walks_are_cut_and_none_is_invalid(demo: World, bytewise: World) -> None:
    """With room for the shortest instance and a quarter more, or 8 tokens."""
    ended = list[bool]()

    @given(RANDOM_SCHEMAS, st.sampled_from(list(WISHES)), st.booleans())
    @settings(
        max_examples=120,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    def walk(schema: Any, wish: str, single_bytes: bool) -> None:
        ended.extend(said.ended for said in walks(bytewise if single_bytes else demo, schema, wish))

    walk()
    assert ended.count(False) <= 0.005 * len(ended)


@pytest.mark.parametrize(
    ("left", "allowed", "banned"), [(100, b'n"\\', b""), (12, b'n"', b"\\"), (11, b'"', b"n \\,")]
)
def test_the_example_of_the_docstring(
    bytewise: World, left: int, allowed: bytes, banned: bytes
) -> None:
    grammar = json_of(PERSON)
    row = Row(bytewise, grammar, bytewise.hints(grammar), b'{"name":"An')
    found = b"".join(row.allowed(left))
    assert {*allowed} <= {*found}
    assert {*banned}.isdisjoint(found)
    if left <= 12:
        assert row.ending(left) == b'","age":0}'
    if left == 11:
        assert found == allowed


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_nothing_is_restricted_far_from_the_limit(demo: World, name: str) -> None:
    grammar = json_of(SCHEMAS[name])
    row = Row(demo, grammar, demo.hints(grammar), b"")
    for token in say(demo, grammar, 120, "opening").tokens:
        before = np.zeros((1, -(-len(demo.text) // 32)), np.int32)
        fill_next_token_bitmask(row.matcher.own, before)
        assert (row.mask(5000) == before[0]).all()
        row.say(token)


@pytest.mark.parametrize("name", ["simple", "forty properties", "formats"])
def test_a_limit_that_no_ending_fits_restricts_nothing(demo: World, name: str) -> None:
    grammar = json_of(SCHEMAS[name])
    known = demo.hints(grammar)
    assert known.tokens is not None
    limit = len(known.tokens) // 2
    guarded = say(demo, grammar, limit, "text", 1, known)
    assert guarded == say(demo, grammar, limit, "text", 1)
    assert not guarded.ended


CALL = '{"name": "find", "arguments": '


@pytest.mark.parametrize(
    "begun", ['{"name":"A\\', '{"na', "{", '{"name":"An","age":1', '{"name":""}']
)
def test_a_call_is_ended_with_its_delimiters(bytewise: World, begun: str) -> None:
    """Its arguments lie within another object and between control tokens."""
    lark = Lark(bytewise.control)
    schema = {**PERSON, "required": ["name"]}
    call = f"{lark.text(f'<|call|>{CALL}')} {lark.json(schema)} /[ ]?/ {lark.text('}<|answer|>')}"
    grammar = lark.source(f"/[a-z {{]*/ ({call})+")
    hints = bytewise.hints(grammar)
    row = Row(bytewise, grammar, hints, b"i call { this ")
    row.say(258)
    for token in f"{CALL}{begun}".encode():
        row.say(token)
    said = b""
    for left in range(40, 0, -1):
        ids = bytewise.allowed(row.mask(left)).tolist()
        if not ids or row.matcher.own.is_accepting():
            break
        said += bytewise.text[ids[-1]]
        row.say(ids[-1])
    assert row.matcher.own.is_accepting(), said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["patterns", "formats", "nested", "forty properties", "wide"])
def test_no_step_takes_more_than_its_calls(
    demo: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted, not timed, so that an answer is the same on a busy machine."""
    schema = SCHEMAS.get(name, WIDE)
    grammar = json_of(schema)
    known = demo.hints(grammar)
    assert known.tokens is not None
    calls = [0]
    validate = YieldingMatcher.validate_tokens

    def counted(self: YieldingMatcher, tokens: list[int]) -> int:
        calls[-1] += known.call
        return validate(self, tokens)

    monkeypatch.setattr(YieldingMatcher, "validate_tokens", counted)
    row = Row(demo, grammar, known, b"")
    tokens = say(demo, grammar, len(known.tokens) + 60, "text", 2, known).tokens
    for at, token in enumerate(tokens):
        calls.append(0)
        row.mask(len(known.tokens) + 60 - at)
        row.say(token)
    assert 0 < max(calls[1:]) <= STEP_CALLS + known.call


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_text_before_a_pattern_does_not_take_what_its_end_needs(demo: World, seed: int) -> None:
    time = {"type": "string", "pattern": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}.\d{6}"}
    texts = obj(name={"type": "string"}, url={"type": "string"})
    schema = obj(made=time, id={"type": "integer"}, changed=time, where=texts)
    grammar = json_of(schema)
    known = demo.hints(grammar)
    assert known.tokens is not None
    said = say(demo, grammar, len(known.tokens) + 16, "anything", seed, known)
    assert said.ended, said.text
    jsonschema.validate(json.loads(said.text), schema)


NODES: dict[str, Any] = {f"x{n}": {"$ref": f"#/$defs/n{n}"} for n in range(20)}
ENDLESS = obj([*NODES], **NODES)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "[" * 50},
        {"properties": {"a": 1}, "required": 5, "minItems": "x"},
        {"$ref": "#/nowhere"},
        {"type": "number", "minimum": float("inf")},
        {"anyOf": [False] * 3000, "oneOf": [False] * 3000},
        {"$defs": {f"n{i}": ENDLESS for i in range(50)}, **ENDLESS},
    ],
)
def test_what_can_not_be_read_of_a_schema_restricts_nothing(bytewise: World, schema: Any) -> None:
    grammar = json_of({"type": "object"})
    unreadable = Grammar(grammar.rules, (("j0", json.dumps(schema)),))
    matcher = YieldingMatcher(bytewise.matcher(grammar))
    hints = completion_hints(unreadable, bytewise.pieces, matcher)
    row = Row(bytewise, grammar, hints, b'{"a":1')
    assert b"5" in row.allowed(30)
