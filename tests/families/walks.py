"""Answers as grammars allow them, made at random, and what a family's parser reads in them."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from llguidance import LLMatcher

from mlx_server.events import Event
from mlx_server.families import family_named
from mlx_server.families.base import ModelFamily
from mlx_server.grammars.compiler import LIMITS
from mlx_server.messages import Tool
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.parsers.parse_context import OutputSpec, ParseContext
from mlx_server.worker.constrained_decoding.grammar_compiler import fill_bitmask
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from tests.families.goldens import goldens_of
from tests.families.prompts import checkpoint_folder

STEPS = 6_000
"""No walk may need more tokens, each of which may be a byte."""

WANDERS = 80
"""Tokens, and then it looks for an end."""

GUIDES = ('"', "'", "}", "]", ")", '"}', "\n", "0", "a", ": ", ", ", "true")
"""What a walk tries, next to the tags that the family's golden outputs show: chance alone does not
find the one text that ends another."""

CLOSERS = ('"', "}", "]", ")", "'")

TAG = re.compile(r"<\|close\|>\w+<\|sep\|>|\n?<[^<>\s]+>|\[/?[A-Z_]+\]|</[^<>]+>")


@lru_cache
def vocabulary_of(family: ModelFamily) -> tuple[Tokenizer, Vocabulary]:
    folder = checkpoint_folder(family)
    tokenizer = Tokenizer(folder / "tokenizer.json")
    stops = [id for name in family.stop_tokens if (id := tokenizer.id_of(name)) is not None]
    return tokenizer, Vocabulary(folder, stops or [max(tokenizer.control_tokens)]).build()


def matcher_of(family: str, grammar: str) -> LLMatcher:
    _, vocabulary = vocabulary_of(family_named(family))
    matcher = LLMatcher(vocabulary.trie, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
    return matcher


def accepts(family: str, grammar: str, answer: str) -> bool:
    """The whole of it, and then its end."""
    at = matcher_of(family, grammar)
    ids = vocabulary_of(family_named(family))[0].encode(answer)
    return at.validate_tokens(ids) == len(ids) and at.consume_tokens(ids) and at.is_accepting()


@dataclass(frozen=True)
class Way:
    """A family, in a vocabulary that has its control tokens or in one that has none."""

    family: ModelFamily
    control: bool

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return vocabulary_of(self.family)[0]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.family)[1]

    @property
    def control_tokens(self) -> Mapping[int, str]:
        return self.tokenizer.control_tokens if self.control else {}

    def reading(self, tools: Sequence[Tool], ends_with: str = "") -> ParseContext:
        prompt = tuple(self.tokenizer.encode(ends_with))
        return ParseContext(0, tuple(tools), prompt, ends_with, self.control_tokens)

    def encode(self, text: str) -> list[int]:
        if self.control:
            return self.tokenizer.encode(text)
        return [self._bytes[byte] for byte in text.encode()]

    @cached_property
    def _bytes(self) -> dict[int, int]:
        texts = enumerate(self.vocabulary.text)
        return {text[0]: id for id, text in texts if len(text) == 1}

    @cached_property
    def guides(self) -> list[list[int]]:
        shown = "".join(case.output for case in goldens_of(self.family))
        texts = sorted({*GUIDES, *TAG.findall(shown)})
        return [self.encode(text) for text in texts]

    @cached_property
    def ends(self) -> list[list[int]]:
        """The delimiters that close all calls of a block, so that no further one begins."""
        formats = self.family.layout_with().call_formats
        return [self.encode(mark) for each in formats for mark in each.closes]

    @cached_property
    def closers(self) -> list[list[int]]:
        shown = "".join(case.output for case in goldens_of(self.family))
        layout = self.family.layout_with()
        ends = [m for n in layout.call_formats for m in (*n.closes, *n.inner)]
        tags = [tag for tag in TAG.findall(shown) if "/" in tag[:4] or "close" in tag]
        marks = {*ends, *tags, *self.family.thinking_delimiters()[1]}
        return [self.encode(text) for text in (*CLOSERS * 2, *sorted(marks))]

    def matcher(self, wanted: OutputSpec) -> LLMatcher:
        grammar = self.family.grammar(wanted)
        assert grammar is not None, "there is no grammar"
        matcher = LLMatcher(self.vocabulary.trie, grammar.source, log_level=0, limits=LIMITS)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def walk(
        self, matcher: LLMatcher, seed: int, begun: str = "", closing: Sequence[str] = ()
    ) -> list[int]:
        """Tokens of an answer, its stop token left out. closing: what leads on to the end, where
        the family's layout does not say it."""
        closers = [self.encode(text) for text in closing] or self.closers
        wild = [self.encode(text) for text in GUIDES] if closing else self.guides
        chance = random.Random(seed)
        said = self.encode(begun)
        assert matcher.consume_tokens(said), matcher.get_error()
        while True:
            if matcher.is_accepting() and chance.random() < len(said) / 40 + 0.05:
                return said
            if matcher.is_stopped():
                return said
            assert len(said) < STEPS, f"no end: {self.spelled(said)[-300:]!r}"
            guides = wild if len(said) < WANDERS else closers
            looks = not closing and len(said) >= WANDERS and chance.random() < 0.2
            ends = self.ends if looks else []
            end = next((e for e in ends if matcher.validate_tokens(e) == len(e)), [])
            step = end or self._guide(matcher, guides, chance) or [self._any(matcher, chance)]
            assert matcher.consume_tokens(step), matcher.get_error()
            said += step

    def _guide(
        self, matcher: LLMatcher, guides: Sequence[list[int]], chance: random.Random
    ) -> list[int]:
        if chance.random() < 0.2:
            return []
        tried = chance.sample(guides, len(guides))
        return next((g for g in tried if matcher.validate_tokens(g) == len(g)), [])

    def allowed(self, matcher: LLMatcher) -> list[int]:
        """The tokens that may come next."""
        words = np.zeros_like(self.vocabulary.ends)
        fill_bitmask(words, matcher, self.vocabulary)
        found: list[int] = np.flatnonzero(
            np.unpackbits(words.view(np.uint8), bitorder="little")
        ).tolist()
        return found

    def _any(self, matcher: LLMatcher, chance: random.Random) -> int:
        allowed = self.allowed(matcher)
        going_on = [id for id in allowed if id not in self.vocabulary.stop_tokens]
        assert going_on, "a dead end"
        return chance.choice(going_on)

    def spelled(self, said: Sequence[int]) -> str:
        return self.tokenizer.raw(list(said))

    def read(self, reading: ParseContext, said: Sequence[int]) -> list[Event]:
        parser = self.family.make_parser(reading)
        text = self.tokenizer.detokenizer()
        events = [event for id in said for event in parser.feed(id, text.feed(id))]
        return events + parser.finish(cut=False)
