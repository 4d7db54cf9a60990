"""Whatever a model prefers to say, a grammar comes to its end before the limit, if it can."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask

from mlx_server.grammars.lark import Lark
from mlx_server.worker.constrained_decoding.completion_proposals import proposals_of
from mlx_server.worker.constrained_decoding.ending_search import EndingSearch, Probe
from mlx_server.worker.constrained_decoding.grammar_completion import (
    STEP_WORK,
    CompletionHints,
    GrammarCompletion,
    searched_hints,
)
from mlx_server.worker.constrained_decoding.lazy_matcher import LazyMatcher
from mlx_server.worker.constrained_decoding.token_classes import Ids, TokenClasses
from mlx_server.worker.constrained_decoding.token_trie import Vocabulary

pytestmark = pytest.mark.tables


def completion_hints(
    classes: TokenClasses, matcher: LLMatcher, grammar: str = ""
) -> CompletionHints:
    """grammar: the matcher's source in Lark; without it, no completions are known."""
    return searched_hints(classes, matcher, proposals_of(grammar, classes))


@dataclass
class World:
    """A vocabulary, and what grammars and endings see of it."""

    text: list[bytes]
    control: dict[int, str]
    tree: LLTokenizer
    stop: int

    @cached_property
    def pieces(self) -> TokenClasses:
        return TokenClasses(self.text, [self.stop], self.control)

    @cached_property
    def wishes(self) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
        """What samplers of bad character like best."""
        return {name: np.array([wish(t) for t in self.text]) for name, wish in WISHES.items()}

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.tree, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher


WISHES: dict[str, Callable[[bytes], float]] = {
    "anything": lambda text: 0.0,
    "opening": lambda text: 3.0 * text.count(b"{") + 2 * text.count(b"[") + text.count(b","),
    "quotes": lambda text: float(b'"' in text),
    "text": lambda text: text.isalpha() + len(text) / 50,
    "digits": lambda text: float(text.isdigit()),
    "blanks": lambda text: float(bool(text) and not text.strip()),
}


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> World:
    known = Vocabulary(demo_path, [2]).build()
    return World(known.text, known.control, known.trie, 2)


@pytest.fixture(scope="module")
def bytewise() -> World:
    class Tokens:
        eos_token_id = 256
        bos_token_id = None
        tokens = (*(bytes([byte]) for byte in range(256)), b"<|end|>", b"<|answer|>", b"<|call|>")
        special_token_ids = (256, 257, 258)

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    tree = LLTokenizer(TokenizerWrapper(Tokens()), eos_token=[256])
    control = {256: "<|end|>", 257: "<|answer|>", 258: "<|call|>"}
    return World([*Tokens.tokens[:256], b"", b"", b""], control, tree, 256)


def lazy(matcher: LLMatcher) -> LazyMatcher:
    return LazyMatcher(lambda: matcher)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("remaining", "allowed", "banned"),
    [(100, b'n"\\', b""), (12, b'n"', b"\\"), (11, b'"', b"n \\,")],
)
def test_the_example_of_the_docstring(
    bytewise: World, remaining: int, allowed: bytes, banned: bytes
) -> None:
    lark = Lark()
    grammar = lark.source(lark.json(PERSON))
    hints = completion_hints(bytewise.pieces, bytewise.matcher(grammar), grammar)
    matcher = bytewise.matcher(grammar)
    completion = GrammarCompletion(bytewise.pieces, hints, lazy(bytewise.matcher(grammar)))
    for token in b'{"name":"An':
        assert matcher.consume_token(token)
        completion.advance(token)
    mask = np.zeros((1, bytewise.tree.vocab_size + 31 >> 5), dtype=np.int32)
    fill_next_token_bitmask(matcher, mask)
    completion.allow(mask[0], remaining)
    found = bytes(id for id in bytewise.pieces.allowed(mask[0]) if id < 256)
    assert {*allowed} <= {*found}
    assert {*banned}.isdisjoint(found)
    if remaining <= 12:
        assert bytes(completion.ending or ()) == b'","age":0}'
    if remaining == 11:
        assert found == allowed


def test_where_the_ending_takes_all_that_is_left_nothing_is_asked(bytewise: World) -> None:
    grammar = json_of(PERSON)
    hints = completion_hints(bytewise.pieces, bytewise.matcher(grammar), grammar)
    matcher = bytewise.matcher(grammar)
    completion = GrammarCompletion(bytewise.pieces, hints, lazy(bytewise.matcher(grammar)))
    mask = np.zeros((1, bytewise.tree.vocab_size + 31 >> 5), dtype=np.int32)
    text = b'{"name":"An","age":0}'
    for at, token in enumerate(text):
        before = completion._probe.work
        fill_next_token_bitmask(matcher, mask)
        completion.allow(mask[0], len(text) + 1 - at)
        if at > len(b'{"name":"An'):
            assert bytewise.pieces.allowed(mask[0]).tolist() == [token]
            assert completion._probe.work == before
        matcher.consume_token(token)
        completion.advance(token)


@dataclass
class Said:
    tokens: list[int]
    text: bytes
    ended: bool


def say(
    world: World,
    grammar: str,
    limit: int,
    wish: str = "anything",
    seed: int = 0,
    known: CompletionHints | None = None,
    *,
    guarded: bool = True,
) -> Said:
    """Among what is allowed, what the wish likes best; a stop token only where little else is."""
    dice = np.random.default_rng(seed)
    matcher = world.matcher(grammar)
    ending = GrammarCompletion(
        world.pieces,
        known or CompletionHints(proposals_of(grammar, world.pieces)),
        LazyMatcher(lambda: world.matcher(grammar)),
    )
    mask = np.zeros((1, -(-len(world.text) // 32)), np.int32)
    said: list[int] = []
    ended = False
    for left in range(limit, 0, -1):
        fill_next_token_bitmask(matcher, mask)
        assert not matcher.is_error(), matcher.get_error()
        if guarded:
            before = mask.copy()
            ending.allow(mask[0], left)
            assert not (mask & ~before).any(), "allowed what the grammar does not"
        stop = bool(mask[0][world.stop // 32] >> world.stop % 32 & 1)
        ids = world.pieces.allowed(mask[0])
        assert stop or len(ids), "nothing is allowed"
        if stop and (not len(ids) or dice.random() < 0.02):
            ended = True
            break
        said.append(chosen(ids, world.wishes[wish], dice))
        matcher.consume_token(said[-1])
        ending.advance(said[-1])
    return Said(said, b"".join(world.text[token] for token in said), ended)


def chosen(ids: Ids, wishes: Any, dice: np.random.Generator) -> int:
    """One time in ten it is anything."""
    liked = wishes[ids] if dice.random() < 0.9 else np.zeros(len(ids))
    return int(ids[(liked + dice.random(len(ids)) * 0.01).argmax()])


def obj(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    wanted = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": wanted,
        "additionalProperties": False,
    }


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
KINDS: list[Any] = [STRING, INTEGER, {"type": "boolean"}, {"type": "number"}]
LARGE = obj(**{f"member_{n}": KINDS[n % 4] for n in range(14)})

SCHEMAS: dict[str, Any] = {
    "simple": obj(["name", "age"], name=STRING, age=INTEGER, tags={"type": "array"}),
    "nested": {
        "$defs": {
            "place": obj(city=STRING, country={"enum": ["Norway", "Chile", "Fiji"]}),
            "person": obj(["name", "home"], name=STRING, home={"$ref": "#/$defs/place"}),
        },
        **obj(
            owner={"$ref": "#/$defs/person"},
            others={"type": "array", "items": {"$ref": "#/$defs/person"}, "minItems": 1},
            level={"enum": ["low", "medium", "high"]},
        ),
    },
    "forty properties": obj(**{f"p{n}": KINDS[n % 4] for n in range(40)}),
    "forty, one required": obj(["last"], **{f"p{n}": KINDS[n % 4] for n in range(40)}, last=STRING),
    "tree": {
        "$defs": {
            "node": obj(value=STRING, children={"type": "array", "items": {"$ref": "#/$defs/node"}})
        },
        "$ref": "#/$defs/node",
    },
    "list": {
        "$defs": {
            "node": obj(next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}, value=INTEGER)
        },
        "$ref": "#/$defs/node",
    },
    "optional recursion": {
        "$defs": {"node": obj(["value"], next={"$ref": "#/$defs/node"}, value=INTEGER)},
        "$ref": "#/$defs/node",
    },
    "formats": obj(
        at={"type": "string", "format": "date-time"},
        id={"type": "string", "format": "uuid"},
        mail={"type": "string", "format": "email"},
        code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,}$"},
        word={"type": "string", "pattern": "^a.*z$"},
    ),
    "lengths": obj(
        ["long", "many", "large"],
        long={"type": "string", "minLength": 40},
        short={"type": "string", "maxLength": 3},
        many={"type": "array", "items": INTEGER, "minItems": 5},
        large={"type": "integer", "minimum": 1000},
        above={"type": "number", "exclusiveMinimum": 0},
    ),
    "large items": {"type": "array", "items": LARGE},
    "large option": obj(["a"], a=STRING, b=LARGE),
    "patterns": obj(
        mail={"type": "string", "pattern": r"^[^@]+@[^@]+\.[^@]+$"},
        word={"type": "string", "pattern": "(foo|bar)"},
        version={"type": "string", "pattern": r"\d+\.\d+\.\d+"},
        name={"type": "string", "pattern": "^[a-z]+$", "minLength": 12},
    ),
    "numbers": obj(
        step={"type": "integer", "multipleOf": 35, "minimum": 1000},
        share={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    ),
    "options": {
        "type": "array",
        "minItems": 2,
        "items": {
            "oneOf": [
                obj(kind={"const": "circle"}, radius={"type": "number"}),
                obj(kind={"const": "rectangle"}, width=INTEGER, height=INTEGER),
            ]
        },
    },
    "any members": {"type": "object"},
    "strings only": {"type": "object", "additionalProperties": STRING, "minProperties": 1},
    "anything": True,
}


WIDE = obj(["m1"], **{f"m{n}": {"anyOf": [INTEGER, STRING]} for n in range(150)})


def half(names: Iterable[str], wishes: Sequence[str]) -> list[tuple[str, str]]:
    """Every name with every other wish, and each wish with every other name."""
    pairs = [(name, wish, i + j) for i, name in enumerate(names) for j, wish in enumerate(wishes)]
    return [(name, wish) for name, wish, number in pairs if number % 2 == 0]


def json_of(schema: Any) -> str:
    lark = Lark()
    return lark.source(lark.json(schema))


ONE_MORE = 200
"""What the last call before the limit may cost."""
MORE = dict(zip(WISHES, (1, 80, 3, 15, 220, 15), strict=True))


def comes_to_its_end(
    world: World, grammar: str, wish: str, check: Callable[[bytes], object]
) -> None:
    """Under what the shortest ending takes for a limit, and under more."""
    known = completion_hints(world.pieces, world.matcher(grammar), grammar)
    assert known.tokens is not None
    need = len(known.tokens) + 1
    for seed, limit in enumerate([need, need + max(8, need // 4), need + MORE[wish]]):
        said = say(world, grammar, limit, wish, seed, known)
        assert said.ended, (limit, said.text)
        check(said.text)


@pytest.mark.parametrize(("name", "wish"), half(SCHEMAS, list(WISHES)))
def test_json_comes_to_its_end(demo: World, name: str, wish: str) -> None:
    schema = SCHEMAS[name]
    comes_to_its_end(
        demo, json_of(schema), wish, lambda text: jsonschema.validate(json.loads(text), schema)
    )


@pytest.mark.parametrize(("name", "wish"), half(SCHEMAS, ["opening", "anything", "text"]))
def test_with_a_token_for_each_byte(bytewise: World, name: str, wish: str) -> None:
    schema = SCHEMAS[name]
    comes_to_its_end(
        bytewise, json_of(schema), wish, lambda text: jsonschema.validate(json.loads(text), schema)
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_nothing_is_restricted_far_from_the_limit(demo: World, name: str) -> None:
    grammar = json_of(SCHEMAS[name])
    known = completion_hints(demo.pieces, demo.matcher(grammar), grammar)
    assert known.tokens is not None
    for wish in ("anything", "opening"):
        matcher = demo.matcher(grammar)
        ending = GrammarCompletion(demo.pieces, known, lazy(demo.matcher(grammar)))
        mask = np.zeros((1, -(-len(demo.text) // 32)), np.int32)
        for token in say(demo, grammar, 120, wish, guarded=False).tokens:
            fill_next_token_bitmask(matcher, mask)
            before = mask.copy()
            ending.allow(mask[0], 5000)
            assert (mask == before).all()
            matcher.consume_token(token)
            ending.advance(token)


@pytest.mark.parametrize("name", ["simple", "forty properties", "formats"])
def test_a_limit_that_no_ending_fits_restricts_nothing(demo: World, name: str) -> None:
    grammar = json_of(SCHEMAS[name])
    known = completion_hints(demo.pieces, demo.matcher(grammar), grammar)
    assert known.tokens is not None
    limit = len(known.tokens) // 2
    guarded = say(demo, grammar, limit, "text", 1, known)
    assert guarded == say(demo, grammar, limit, "text", 1, guarded=False)
    assert not guarded.ended


def after_a_control_token(lark: Lark) -> str:
    return f"{lark.up_to('<|answer|>')} {lark.json(SCHEMAS['simple'])}"


def after_a_text_mark(lark: Lark) -> str:
    return f"{lark.up_to('</think>')} {lark.json(SCHEMAS['simple'])}"


def tagged_call(lark: Lark) -> str:
    return (
        r'"<tool_call>\n<function=walk>\n<parameter=to>\n" '
        + lark.up_to("</parameter>")
        + r' "\n<parameter=how>\n" '
        + lark.up_to("</parameter>")
        + r' "\n</function>\n</tool_call>"'
    )


def python_call(lark: Lark) -> str:
    text = lark.terminal(r"/'([^'\\\n]|\\['\\n])*'/")
    return f'"[walk(to=" {text} ", steps=" /[0-9]+/ (", then=" {text})? ")]"'


GRAMMARS: dict[str, tuple[Callable[[Lark], str], str]] = {
    "after a control token": (after_a_control_token, r'.*\{.*"name".*\}\s*'),
    "after a text mark": (after_a_text_mark, r'.*</think>\s*\{.*"name".*\}\s*'),
    "tags": (tagged_call, r"<tool_call>.*</parameter>\n<parameter=how>.*</function>\n</tool_call>"),
    "python": (python_call, r"\[walk\(to='.*', steps=[0-9]+.*\)\]"),
    "regex": (lambda lark: "/a(b|cd{40})*(xy|z{60})/", r"a(b|cd{40})*(xy|z{60})"),
    "choice": (lambda lark: '"yes" | "no" | "perhaps not at all"', "yes|no|perhaps not at all"),
    "a call or text": (
        lambda lark: f"/[a-z ]*/ | {lark.text('<|call|>')} {lark.json(SCHEMAS['nested'])}",
        r"[a-z ]*|\{.*\}\s*",
    ),
}


TEXTUAL = [name for name in GRAMMARS if name not in ("after a control token", "a call or text")]


@pytest.mark.parametrize(("name", "wish"), half(GRAMMARS, list(WISHES)))
def test_other_grammars_come_to_their_end(bytewise: World, name: str, wish: str) -> None:
    start, whole = GRAMMARS[name]
    lark = Lark(bytewise.control)
    pattern = re.compile(whole.encode(), re.DOTALL)

    def check(text: bytes) -> None:
        assert pattern.fullmatch(text)

    comes_to_its_end(bytewise, lark.source(start(lark)), wish, check)


@pytest.mark.parametrize(("name", "wish"), half(TEXTUAL, list(WISHES)[::-1]))
def test_other_grammars_in_long_tokens(demo: World, name: str, wish: str) -> None:
    start, whole = GRAMMARS[name]
    lark = Lark(demo.control)
    pattern = re.compile(whole.encode(), re.DOTALL)

    def check(text: bytes) -> None:
        assert pattern.fullmatch(text)

    comes_to_its_end(demo, lark.source(start(lark)), wish, check)


@pytest.mark.parametrize("limit", [1, 2, 40, 100])
def test_free_text_runs_into_its_limit(demo: World, limit: int) -> None:
    """It may stop anywhere, so the search need not end it."""
    lark = Lark(demo.control)
    grammar = lark.source(lark.anything())
    said = say(demo, grammar, limit, "text", 3)
    assert said == say(demo, grammar, limit, "text", 3, guarded=False)


def test_a_call_is_not_begun_where_it_cannot_be_ended(bytewise: World) -> None:
    lark = Lark(bytewise.control)
    grammar = lark.source(f"{lark.anything()} ({lark.text('<|call|>')} {lark.json(LARGE)})?")
    matcher, mask = bytewise.matcher(grammar), np.zeros((1, 9), np.int32)
    known = completion_hints(bytewise.pieces, matcher, grammar)
    begins = {}
    for left in (20, 1000):
        fill_next_token_bitmask(matcher, mask)
        GrammarCompletion(bytewise.pieces, known, lazy(matcher)).allow(mask[0], left)
        begins[left] = 258 in bytewise.pieces.allowed(mask[0])
        assert ord("a") in bytewise.pieces.allowed(mask[0])
    assert begins == {20: False, 1000: True}


def test_the_matcher_is_left_as_it_was(demo: World) -> None:
    matcher = demo.matcher(json_of(SCHEMAS["tree"]))
    before = matcher.compute_bitmask()
    mask = np.frombuffer(before, np.int32).copy()
    known = completion_hints(demo.pieces, matcher)
    GrammarCompletion(demo.pieces, known, lazy(matcher)).allow(mask, 30)
    assert matcher.compute_bitmask() == before
    assert not matcher.is_error()


def test_lines_within_json_are_ended(bytewise: World) -> None:
    """Their end is two characters among many, which nothing but a hint would find."""
    text = {"type": "string", "pattern": r"^begin\n(?:\+.*\n)+end$"}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    lark = Lark()
    grammar = lark.source(lark.json({**schema, "additionalProperties": False}))
    found = completion_hints(bytewise.pieces, bytewise.matcher(grammar), grammar).tokens
    assert found is not None
    written = json.loads(b"".join(bytewise.text[token] for token in found))
    assert re.fullmatch(r"begin\n(\+.*\n)+end", written["input"])


class Counted:
    """A matcher, and the sizes of the sequences that it was asked about."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.asked: list[int] = []

    def validate_tokens(self, tokens: list[int]) -> int:
        self.asked.append(len(tokens))
        return self._matcher.validate_tokens(tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@pytest.mark.parametrize(
    ("name", "dearer"),
    [("patterns", 1), ("formats", 1), ("nested", 1), ("forty properties", 8), ("wide", 30)],
)
def test_no_step_takes_more_than_its_work(demo: World, name: str, dearer: int) -> None:
    """It is counted in calls of the matcher, so that it is the same on a busy machine. dearer: what
    a call for several tokens costs at least, as the grammar reads all members after a value."""
    grammar = json_of(SCHEMAS.get(name, WIDE))
    known = completion_hints(demo.pieces, demo.matcher(grammar), grammar)
    assert known.tokens is not None
    row = GrammarCompletion(demo.pieces, known, lazy(demo.matcher(grammar)))
    matcher, mask = demo.matcher(grammar), np.zeros((1, -(-len(demo.text) // 32)), np.int32)
    counted: Any = Counted(row._probe.matcher)
    row._probe.matcher = counted
    tokens = say(demo, grammar, len(known.tokens) + 60, "text", 2, known).tokens
    spent = []
    for at, token in enumerate(tokens):
        before = row._probe.work
        counted.asked.clear()
        fill_next_token_bitmask(matcher, mask)
        row.allow(mask[0], len(known.tokens) + 60 - at)
        spent.append(row._probe.work - before)
        assert sum(dearer if size > 1 else 1 for size in counted.asked) <= spent[-1]
        matcher.consume_token(token)
        row.advance(token)
    assert 0 < max(spent) <= STEP_WORK + ONE_MORE


@pytest.mark.parametrize(("text", "is_costly"), [(b'{"m1":-3', True), (b'{"m1":"q', False)])
def test_after_a_digit_in_a_wide_object_few_ends_are_tried(
    demo: World, text: bytes, is_costly: bool
) -> None:
    """There each costs as much as the object has members, and others have to be tried too."""
    grammar = json_of(WIDE)
    proposals = proposals_of(grammar, demo.pieces)
    probe, search = (
        Probe(demo.matcher(grammar), demo.pieces, proposals.width),
        EndingSearch(demo.pieces, proposals),
    )
    probe.take(demo.pieces.cut(text))
    assert probe.is_costly is is_costly
    known = demo.pieces.cut(b',"m2":0' * 20 + b"}")
    tails = search._tails(known, 1, is_costly=probe.is_costly)
    assert [*known, demo.pieces.stop] in tails
    assert (len(tails) * len(WIDE["properties"]) > 2 * STEP_WORK) is not is_costly


def test_what_a_step_can_not_judge_the_next_ones_do_and_not_again(
    demo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the name of a further member, many kinds of tokens change the ending. Each search costs as
    much as in an object that lists many members."""
    find = EndingSearch.find

    def dear(self: EndingSearch, probe: Any, *rest: Any) -> list[int] | None:
        probe.work += 110
        return find(self, probe, *rest)

    monkeypatch.setattr(EndingSearch, "find", dear)
    grammar = json_of({"type": "object", "properties": {"a": {"pattern": "(foo|bar)"}}})
    known = completion_hints(demo.pieces, demo.matcher(grammar), grammar)
    row = GrammarCompletion(demo.pieces, known, lazy(demo.matcher(grammar)))
    matcher, mask = demo.matcher(grammar), np.zeros((1, -(-len(demo.text) // 32)), np.int32)
    spent, found = [], []
    for token in [*demo.pieces.cut(b'{"'), *demo.pieces.cut(b"q") * 12]:
        matcher.consume_token(token)
        row.advance(token)
        fill_next_token_bitmask(matcher, mask)
        before = row._probe.work
        row.allow(mask[0], 8)
        spent.append(row._probe.work - before)
        found.append(len(demo.pieces.allowed(mask[0])))
    assert sum(work > STEP_WORK - ONE_MORE for work in spent) > 2  # it took several steps
    assert max(spent[-4:]) < 120, spent
    assert found[-1] > found[2], (spent, found)


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


@pytest.mark.parametrize("pattern", EVERYDAY)
@pytest.mark.parametrize("wish", ["anything", "text"])
def test_everyday_patterns_come_to_their_end(
    demo: World, bytewise: World, pattern: str, wish: str
) -> None:
    schema = obj(v={"type": "string", "pattern": pattern})
    for world in (demo, bytewise):
        comes_to_its_end(
            world, json_of(schema), wish, lambda text: jsonschema.validate(json.loads(text), schema)
        )


@pytest.mark.parametrize("seed", range(8))
def test_text_before_a_pattern_does_not_take_what_its_end_needs(demo: World, seed: int) -> None:
    """The pattern's shortest text is longer than what of an ending is tried after a plain token."""
    time = {"type": "string", "pattern": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}.\d{6}"}
    schema = obj(made=time, id=INTEGER, changed=time, where=obj(name=STRING, url=STRING))
    grammar = json_of(schema)
    known = completion_hints(demo.pieces, demo.matcher(grammar), grammar)
    assert known.tokens is not None
    said = say(demo, grammar, len(known.tokens) + 16, "anything", seed, known)
    assert said.ended, said.text
    jsonschema.validate(json.loads(said.text), schema)


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


@pytest.mark.soak
@given(RANDOM_SCHEMAS, st.sampled_from(list(WISHES)), st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_no_random_schema_is_cut(
    demo: World, bytewise: World, schema: Any, wish: str, single_bytes: bool
) -> None:
    """With room for the shortest instance and a quarter more, or 8 tokens."""
    comes_to_its_end(
        bytewise if single_bytes else demo,
        json_of(schema),
        wish,
        lambda text: jsonschema.validate(json.loads(text), schema),
    )


def test_near_the_limit_a_text_still_has_its_quotes_and_parts_of_characters(demo: World) -> None:
    """What only completes a character needs no search, so that work is left for the others."""
    names = {"name": {"type": "string"}, "note": {"type": "string"}, "n": {"type": "integer"}}
    schema = {"type": "object", "properties": names, "required": ["name"]}
    grammar = f"start: %json {json.dumps(schema)}"
    matcher, search = demo.matcher(grammar), demo.matcher(grammar)
    hints = completion_hints(demo.pieces, search, grammar)
    completion = GrammarCompletion(demo.pieces, hints, lazy(search))
    for token in demo.pieces.cut(b'{"name":"John'):
        matcher.consume_token(token)
        completion.advance(token)
    mask = np.zeros(-(-len(demo.text) // 32), np.int32)
    fill_next_token_bitmask(matcher, mask[None])
    completion.allow(mask, 12)
    for text in (b' "', b'"}', b"\xe0", b"\\"):
        (token,) = demo.pieces.known([text])
        assert mask[token // 32] >> (token % 32) & 1, text


def test_the_matcher_of_the_search_is_built_only_near_the_limit(demo: World) -> None:
    grammar = json_of(SCHEMAS["simple"])
    known = completion_hints(demo.pieces, demo.matcher(grammar), grammar)
    built: list[LLMatcher] = []

    def build() -> LLMatcher:
        built.append(demo.matcher(grammar))
        return built[-1]

    row = GrammarCompletion(demo.pieces, known, LazyMatcher(build))
    mask = np.zeros(-(-len(demo.text) // 32), np.int32)
    row.allow(mask, 100_000)
    for left, token in enumerate(demo.pieces.cut(b'{"name":"')):
        row.advance(token)
        row.allow(mask, 99_999 - left)
    assert not built
    row.allow(mask, 20)
    assert len(built) == 1
