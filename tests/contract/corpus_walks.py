"""Random walks through a grammar under a small token limit, under which few answers are cut.

The limit is what the shortest known answer takes and a quarter more, or 8 tokens.
"""

from collections.abc import Callable, Iterator

import numpy as np

from mlx_server.worker.constrained_decoding.grammar_compiler import CompiledGrammar, fill_bitmask
from mlx_server.worker.constrained_decoding.grammar_completion import GrammarCompletion
from mlx_server.worker.constrained_decoding.mask_threads import YieldingMatcher
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary

TASTES: dict[str, Callable[[bytes], float]] = {
    "anything": lambda text: 0.0,
    "opening": lambda text: 3.0 * text.count(b"{") + 2 * text.count(b"[") + text.count(b","),
    "text": lambda text: text.isalpha() + len(text) / 50,
}
"""What a walk likes best of the allowed tokens, nine times in ten."""


def cut_walks(grammar: CompiledGrammar, vocabulary: Vocabulary) -> Iterator[str | None]:
    """Walks once by each taste; yields the taste of a walk that was cut, and None for others."""
    ending = grammar.completion.tokens
    if ending is None:
        yield "no ending is known"
        return
    need = len(ending) + 1
    for seed, taste in enumerate(TASTES):
        dice = np.random.default_rng(seed)
        ended = _ends(grammar, vocabulary, need + max(8, need // 4), TASTES[taste], dice)
        yield None if ended else taste


def _ends(
    grammar: CompiledGrammar,
    vocabulary: Vocabulary,
    limit: int,
    taste: Callable[[bytes], float],
    dice: np.random.Generator,
) -> bool:
    row = grammar.copy()
    own = YieldingMatcher(row.matcher)
    classes, text = vocabulary.token_classes, vocabulary.text
    completion = GrammarCompletion(classes, row.completion)
    mask = np.zeros_like(vocabulary.ends)
    for left in range(limit, 0, -1):
        fill_bitmask(mask, row.matcher, vocabulary)
        if row.matcher.is_stopped():
            return True
        completion.allow(mask.view(np.int32), left, own)
        ids = classes.allowed(mask.view(np.int32))
        if not len(ids):  # only a stop token
            return True
        liked = dice.random() < 0.9
        wishes = [taste(text[id]) if liked else 0.0 for id in ids]
        token = int(ids[(np.array(wishes) + dice.random(len(ids)) * 0.01).argmax()])
        row.matcher.consume_token(token)
        completion.advance(token)
    return False
