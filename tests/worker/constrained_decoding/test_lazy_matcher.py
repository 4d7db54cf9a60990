"""The matcher of the search is built when it is first needed."""

import numpy as np
import pytest
from llguidance import LLMatcher

from mlx_server.worker.constrained_decoding.grammar_completion import GrammarCompletion
from mlx_server.worker.constrained_decoding.lazy_matcher import LazyMatcher
from tests.worker.constrained_decoding.worlds import SCHEMAS, World, completion_hints, json_of

pytestmark = pytest.mark.tables


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
