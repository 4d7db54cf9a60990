"""Random answers that a grammar allows, hostile where it lets them be."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from mlx_server.families import family_named
from mlx_server.sources.replay_checkpoint import END, replay_checkpoint
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from tests.families.goldens import _scratch, tokenizer_of

HOSTILE = (
    *("\n", " ", "x", "é", "🗼", "\\", "'", '"', '"""', ",", ", b=2", "(", ")", "[", "]", "{", "}"),
    *("null", "None", "true", "7", "-1.5e3", '{"a": 1}', "[1]", "</", "<", ">", "&quot;", "\x1c7"),
    *("</parameter></function>", "\n<parameter=count>", "\n<function=all>"),
    *("</parameter>", "\n</parameter>\n<parameter=x>", "</function>", "<function=f>", "</invoke>"),
    *("</arg_value>", "</tool_call>", "</arg_key><arg_value>", '<|"|>', "<escape>", "<|close|>"),
)
LONGEST = 20_000


@lru_cache
def tree_of(family_name: str) -> LLTokenizer:
    family = family_named(family_name)
    folder = replay_checkpoint(Path(_scratch().name), family)
    tokenizer = tokenizer_of(family_name)
    ends = [token for token in family.stop_tokens if tokenizer.id_of(token) is not None] or [END]
    return Vocabulary(folder, [tokenizer.encode(token)[0] for token in ends]).build().trie


def matcher(family_name: str, grammar: str) -> LLMatcher:
    made = LLMatcher(tree_of(family_name), LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not made.is_error(), f"{made.get_error()}\n{grammar}"
    return made


def accepts(family_name: str, grammar: str, answer: str) -> bool:
    """The whole of it, and then its end."""
    at = matcher(family_name, grammar)
    ids = tokenizer_of(family_name).encode(answer)
    return at.validate_tokens(ids) == len(ids) and at.consume_tokens(ids) and at.is_accepting()


def walk(family_name: str, grammar: str, seed: int, closing: Sequence[str]) -> list[int]:
    """closing: what leads on to the end, as text; a walk that has gone on for long takes these."""
    return _Walk(family_name, grammar, seed, closing).tokens()


class _Walk:
    def __init__(self, family_name: str, grammar: str, seed: int, closing: Sequence[str]) -> None:
        self._tree = tree_of(family_name)
        self._tokenizer = tokenizer_of(family_name)
        self._matcher = matcher(family_name, grammar)
        self._random = Random(seed)
        self._closing = [self._tokenizer.encode(text) for text in closing]
        self._hostile = [self._spelled(text) for text in HOSTILE]
        self._mask = np.zeros((1, (self._tree.vocab_size + 31) // 32), np.int32)

    def _spelled(self, text: str) -> list[int]:
        """As text, whatever control tokens it spells."""
        return [id for sign in text for id in self._tokenizer.encode(sign)]

    def tokens(self) -> list[int]:
        found: list[int] = []
        wild = self._random.randrange(5, 60)
        for step in range(LONGEST):
            accepting = self._matcher.is_accepting()
            if self._matcher.is_stopped() or (accepting and self._random.random() < 0.3):
                return found
            new = self._step(wild=step < wild)
            assert self._matcher.consume_tokens(new), self._matcher.get_error()
            found += new
        raise AssertionError(f"no end: {self._tokenizer.raw(found)[-300:]!r}")

    def _step(self, *, wild: bool) -> list[int]:
        likely = self._hostile if wild and self._random.random() < 0.7 else self._closing
        for text in self._random.sample(likely, len(likely)) if self._random.random() < 0.8 else ():
            allowed = self._matcher.validate_tokens(text)
            if allowed == len(text) or (allowed and wild):
                return text[:allowed]
        return [self._random.choice(self._allowed())]

    def _allowed(self) -> list[int]:
        fill_next_token_bitmask(self._matcher, self._mask, 0)
        assert not self._matcher.is_error(), self._matcher.get_error()
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        ends = self._tree.eos_tokens
        found = [int(id) for id in np.flatnonzero(bits) if id not in ends]
        assert found, "nothing is allowed, and it is no end"
        return found
