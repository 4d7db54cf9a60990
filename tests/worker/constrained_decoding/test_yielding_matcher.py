"""Slow matchers answer as quick ones do, with calls that let other threads run."""

import random

import pytest

from mlx_server.engine.messages import Grammar
from mlx_server.worker.constrained_decoding import mask_threads
from mlx_server.worker.constrained_decoding.mask_threads import YieldingMatcher
from tests.worker.constrained_decoding.grammars import HEAD, JSON, WORDS
from tests.worker.constrained_decoding.worlds import World

AMBIGUOUS = HEAD + 'start: s\ns: "a" | "b" | s s | s s s\n'


@pytest.mark.parametrize("grammar", [AMBIGUOUS, WORDS, JSON], ids=["ambiguous", "words", "json"])
def test_a_slow_matcher_answers_as_a_quick_one(
    demo: World, grammar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_threads, "SLOW_SECONDS", -1.0)
    quick, slow = (demo.matcher(Grammar(grammar)), YieldingMatcher(demo.matcher(Grammar(grammar))))
    dice = random.Random(grammar)
    for _ in range(12):
        mask = quick.compute_bitmask()
        allowed = [id for id in range(len(demo.text)) if mask[id >> 3] >> (id & 7) & 1]
        for length in (1, 2, 5):
            tokens = [dice.choice(allowed) for _ in range(length)]
            tokens += [dice.randrange(len(demo.text)), demo.stop][: dice.randrange(3)]
            assert slow.validate_tokens(tokens) == quick.validate_tokens(tokens), tokens
        assert slow.own.is_accepting() == quick.is_accepting()
        token = dice.choice([id for id in allowed if id != demo.stop] or allowed)
        assert slow.consume_token(token) == quick.consume_token(token)
        assert slow.own.deep_copy().compute_bitmask() == quick.deep_copy().compute_bitmask()
    assert slow.is_slow
    assert not slow.consume_token(next(id for id in range(3) if id not in allowed))
    assert slow.own.is_error()
