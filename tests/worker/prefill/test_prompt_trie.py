"""Our search of mlx-lm's trie finds what mlx-lm's own does."""

import random

from mlx_lm.models.cache import PromptTrie

from mlx_server.worker.prefill.prompt_cache import _Trie


def test_it_finds_what_mlx_lm_finds() -> None:
    draw = random.Random(1)

    def tokens(most: int) -> list[int]:
        return [draw.randint(0, 2) for _ in range(draw.randint(1, most))]

    for _ in range(2000):
        ours, theirs = _Trie(), PromptTrie()
        for known in [tokens(8) for _ in range(draw.randint(1, 6))]:
            ours.add("m", known, 1)
            theirs.add("m", known, 1)
        asked = tokens(9)
        found, expected = ours.search("m", asked), theirs.search("m", asked)
        assert found.exact == expected.exact
        assert found.common_prefix == expected.common_prefix
        # theirs overlooks a known prefix of a single token
        assert (found.shorter or [])[1:] == (expected.shorter or [])[1:]
        # of several nearest ones either may be taken
        assert len(found.longer or []) == len(expected.longer or [])
        if found.longer:
            assert ours.get("m", found.longer) == 1


def test_another_model_has_nothing_here() -> None:
    trie = _Trie()
    trie.add("m", [1, 2, 3], 1)
    found = trie.search("other", [1, 2, 3])
    assert (found.exact, found.shorter, found.longer, found.common_prefix) == (None, None, None, 0)
