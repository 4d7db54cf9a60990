"""Vocabularies, grammars and what samplers of bad character say with them."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from mlx_server.engine.messages import Grammar
from mlx_server.grammars.lark import Lark
from mlx_server.worker.constrained_decoding.grammar_completion import (
    CompletionHints,
    GrammarCompletion,
    completion_hints,
)
from mlx_server.worker.constrained_decoding.mask_threads import YieldingMatcher
from mlx_server.worker.constrained_decoding.vocabulary import Ids, Mask, TokenClasses


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

    def allowed(self, mask: Mask) -> Ids:
        """The tokens that a mask allows, without the stop token."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(self.text)]
        bits[self.stop : self.stop + 1] = 0
        return np.flatnonzero(bits)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self.tree, grammar.source, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def hints(self, grammar: Grammar) -> CompletionHints:
        return completion_hints(grammar, self.pieces, YieldingMatcher(self.matcher(grammar)))


WISHES: dict[str, Callable[[bytes], float]] = {
    "anything": lambda text: 0.0,
    "opening": lambda text: 3.0 * text.count(b"{") + 2 * text.count(b"[") + text.count(b","),
    "quotes": lambda text: float(b'"' in text),
    "text": lambda text: text.isalpha() + len(text) / 50,
    "digits": lambda text: float(text.isdigit()),
    "blanks": lambda text: float(bool(text) and not text.strip()),
}


@dataclass
class Said:
    tokens: list[int]
    text: bytes
    ended: bool


def say(
    world: World,
    grammar: Grammar,
    limit: int,
    wish: str = "anything",
    seed: int = 0,
    known: CompletionHints | None = None,
) -> Said:
    """Among what is allowed, what the wish likes best; a stop token only where little else is.
    known: without it, no ending is kept free."""
    dice = np.random.default_rng(seed)
    matcher = world.matcher(grammar)
    ending = GrammarCompletion(world.pieces, known) if known else None
    own = YieldingMatcher(matcher)
    mask = np.zeros((1, -(-len(world.text) // 32)), np.int32)
    said: list[int] = []
    ended = False
    for left in range(limit, 0, -1):
        fill_next_token_bitmask(matcher, mask)
        assert not matcher.is_error(), matcher.get_error()
        if ending:
            before = mask.copy()
            ending.allow(mask[0], left, own)
            assert not (mask & ~before).any(), "allowed what the grammar does not"
        stop = bool(mask[0][world.stop // 32] >> world.stop % 32 & 1)
        ids = world.allowed(mask[0])
        assert stop or len(ids), "nothing is allowed"
        if stop and (not len(ids) or dice.random() < 0.02):
            ended = True
            break
        said.append(chosen(ids, world.wishes[wish], dice))
        matcher.consume_token(said[-1])
        if ending:
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

SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("schemas.json").read_text("utf-8"))


WIDE = obj(["m1"], **{f"m{n}": {"anyOf": [INTEGER, STRING]} for n in range(150)})


def half(names: Iterable[str], wishes: Sequence[str]) -> list[tuple[str, str]]:
    """Every name with every third wish, and each wish with every third name."""
    pairs = [(name, wish, i + j) for i, name in enumerate(names) for j, wish in enumerate(wishes)]
    return [(name, wish) for name, wish, number in pairs if number % 3 == 0]


def json_of(schema: Any) -> Grammar:
    lark = Lark()
    return lark.source(lark.json(schema))


MORE = dict(zip(WISHES, (1, 80, 3, 15, 220, 15), strict=True))


def walks(world: World, schema: Any, wish: str) -> Iterator[Said]:
    """Answers under what the shortest ending takes for a limit, and under more; those that ended
    are valid."""
    grammar = json_of(schema)
    known = world.hints(grammar)
    assert known.tokens is not None
    need = len(known.tokens) + 1
    for seed, limit in enumerate([need, need + max(8, need // 4), need + MORE[wish]]):
        said = say(world, grammar, limit, wish, seed, known)
        if said.ended:
            jsonschema.validate(json.loads(said.text), schema)
        yield said
