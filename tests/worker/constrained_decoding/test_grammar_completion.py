"""Whatever a model prefers to say, a grammar comes to its end before the limit, if it can."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance.numpy import fill_next_token_bitmask

from mlx_server.grammars.lark import Lark
from mlx_server.worker.constrained_decoding.ending_search import EndingSearch
from mlx_server.worker.constrained_decoding.grammar_completion import STEP_WORK, GrammarCompletion
from mlx_server.worker.constrained_decoding.yielding_matcher import YieldingMatcher
from tests.worker.constrained_decoding.worlds import (
    INTEGER,
    LARGE,
    SCHEMAS,
    STRING,
    WIDE,
    World,
    completion_hints,
    json_of,
    lazy,
    obj,
    say,
)

pytestmark = pytest.mark.tables


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


ONE_MORE = 200
"""What the last call before the limit may cost."""
SEARCHED = 130
"""What a search costs where it is made dear."""


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


class Counted:
    """A matcher, and the sizes of the sequences that it was asked about."""

    def __init__(self, matcher: YieldingMatcher) -> None:
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


def test_what_a_step_can_not_judge_the_next_ones_do_and_not_again(
    demo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the name of a further member, many kinds of tokens change the ending. Each search costs as
    much as in an object that lists many members."""
    find = EndingSearch.find

    def dear(self: EndingSearch, probe: Any, *rest: Any) -> list[int] | None:
        probe.work += SEARCHED
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
    assert max(spent[-4:]) < SEARCHED + 10, spent
    assert found[-1] > found[2], (spent, found)


def judged(
    world: World, grammar: str, text: bytes, left: int
) -> tuple[GrammarCompletion, np.ndarray[Any, np.dtype[np.int32]]]:
    """Returns a row that has said a text and judged what may come next, and its mask."""
    matcher = world.matcher(grammar)
    known = completion_hints(world.pieces, matcher, grammar)
    row = GrammarCompletion(world.pieces, known, lazy(world.matcher(grammar)))
    for token in world.pieces.cut(text):
        matcher.consume_token(token)
        row.advance(token)
    mask = np.zeros((1, -(-len(world.text) // 32)), np.int32)
    fill_next_token_bitmask(matcher, mask)
    row.allow(mask[0], left)
    return row, mask[0]


def test_an_ending_is_searched_once_for_tokens_that_share_it(
    demo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 60 kinds of tokens begin a name, and none of them keeps the ending."""
    searched = []
    find = EndingSearch.find

    def seen(self: EndingSearch, *rest: Any) -> list[int] | None:
        searched.append(find(self, *rest))
        return searched[-1]

    monkeypatch.setattr(EndingSearch, "find", seen)
    row, _ = judged(demo, json_of({"type": "object"}), b'{"a":0,', 10)
    found = [row._endings[id] for id in row._changing if id in row._endings]
    assert len(found) > 40
    assert len(searched) < 12


def test_what_stands_before_a_quote_is_not_judged(
    demo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    keeps = GrammarCompletion._keeps

    def seen(self: GrammarCompletion, token: int, *rest: Any) -> bool:
        asked.append(token)
        return keeps(self, token, *rest)

    monkeypatch.setattr(GrammarCompletion, "_keeps", seen)
    _, mask = judged(demo, json_of(obj(name=STRING, other=STRING)), b'{"name":"A', 14)
    ends = {id for id in demo.pieces.exits if id in demo.pieces.allowed(mask)}
    said = [demo.text[id].partition(b'"')[2] for id in {*asked} & demo.pieces.exits]
    assert 2 < len(said) == len({*said}) < len(ends) // 8, (said, len(ends))


def test_a_delimiter_that_has_begun_is_not_broken_where_there_is_no_room(bytewise: World) -> None:
    """Text takes what follows of the ending, so that only all of it shows that it ends nothing."""
    lark = Lark(bytewise.control)
    closing = "</parameter>\\n<parameter=how>\\n</parameter>"
    grammar = lark.source(f'"<to>" {lark.up_to("</parameter>")} "{closing[12:]}"')
    rest = closing.replace("\\n", "\n").encode()
    for begun in range(2, 12):
        row, mask = judged(bytewise, grammar, b"<to>" + rest[:begun], len(rest) - begun + 2)
        assert row.ending == [*rest[begun:]]
        assert ord(":") not in bytewise.pieces.allowed(mask), rest[:begun]


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
