"""Every kind of cache and of weights loads, batches, cancels, and is cached without being wrong."""

from pathlib import Path

import numpy as np
import pytest

from tests.worker.bench import TOKENS, Bench
from tests.worker.kinds import KINDS, Kind
from tests.worker.lora_files import network
from tests.worker.one_pass import expected

pytestmark = pytest.mark.slow

WINDOW = 32
"""Of the kinds that have one; prompts on both sides of it, and answers that cross it."""

CACHES = [kind for kind in KINDS if not kind.name.startswith("llama-")]
"""One of each kind of cache: how weights are kept makes no difference to it."""


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    lengths = [1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 70, 100, 300]
    return [random.integers(0, 256, lengths[i % len(lengths)]).tolist() for i in range(count)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: Kind = request.param
    return kind.save(tmp_path_factory.mktemp("kinds") / kind.name)


@pytest.fixture(scope="module", params=CACHES, ids=lambda kind: kind.name)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: Kind = request.param
    return kind.save(tmp_path_factory.mktemp("caches") / kind.name)


def alone(path: Path, asked: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """What mlx-lm answers to each. answers: what the engine says."""
    model = network(path)
    return [expected(model, *pair, TOKENS) for pair in zip(asked, answers, strict=True)]


def test_in_company_as_alone(path: Path) -> None:
    bench = Bench(path)
    together = bench.together(prompts(8))
    assert together == alone(path, prompts(8), together)


def test_the_prompt_cache_changes_no_answer(kept: Path) -> None:
    cached = Bench(kept, cache_bytes=1 << 30)
    for first in prompts(8)[2::2]:  # one too short for the window, one longer, one much longer
        said = cached.answer(first)
        turns = [
            first,  # again
            [*first, *said, 7, 8, 9],  # the next turn of the conversation
            [*first[:-5], 1, 2, 3, 4, 5, 6],  # the same beginning, another end
            [*first, *said[:-6], 11, 12, 13, 14],  # part of the answer dropped
        ]
        answers = [cached.answer(turn) for turn in turns]
        assert answers == alone(kept, turns, answers)
    assert sum(cached.cached.values()) > 0


@pytest.mark.parametrize("lengths", [(1, 2), (2, 1, 1), (WINDOW + 1, 1, 2)], ids=str)
def test_prompts_of_a_token_or_two_share_a_piece(kept: Path, lengths: tuple[int, ...]) -> None:
    bench = Bench(kept)
    random = np.random.default_rng(5)
    asked = [random.integers(0, 256, length).tolist() for length in lengths]
    together = bench.together(asked)
    assert together == alone(kept, asked, together)


def test_known_and_unknown_prompts_share_a_piece(kept: Path) -> None:
    """What is left of them to compute differs: nothing, a token, some, all."""
    cached = Bench(kept, cache_bytes=1 << 30)
    known = prompts(8)[4:]
    rows = [cached.begin(prompt, 40) for prompt in known]
    while not all(row in cached.cached for row in rows):
        cached.step()
    asked = [known[0], [*known[1], 4, 5], [*known[2], *range(20)], [9], known[3][:200]]
    rows = [cached.begin(prompt) for prompt in asked]
    finished = cached.finish()
    assert any(cached.cached[row] for row in rows)
    together = [finished[row] for row in rows]
    assert together == alone(kept, asked, together)
