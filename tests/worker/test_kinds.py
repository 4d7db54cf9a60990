"""Every kind of cache and of weights loads, batches, cancels, and is cached without being wrong."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.worker.bench import TOKENS, Bench
from tests.worker.kinds import CACHES, STORED, WINDOW
from tests.worker.lora_files import network
from tests.worker.one_pass import expected

pytestmark = pytest.mark.slow


def prompts(count: int) -> list[list[int]]:
    """On both sides of a window; answers cross it."""
    random = np.random.default_rng(3)
    lengths = [1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 70, 100, 300]
    return [random.integers(0, 256, lengths[i % len(lengths)]).tolist() for i in range(count)]


@pytest.fixture(scope="module", params=CACHES)
def kept(request: pytest.FixtureRequest, made: Callable[[str], Path]) -> Path:
    return made(request.param)


def alone(path: Path, asked: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """What mlx-lm answers to each. answers: what the engine says."""
    model = network(path)
    return [expected(model, *pair, TOKENS) for pair in zip(asked, answers, strict=True)]


@pytest.mark.parametrize("path", [*CACHES, *(kind.name for kind in STORED)], indirect=True)
def test_in_company_as_alone(path: Path) -> None:
    bench = Bench(path)
    together = bench.together(prompts(8))
    assert together == alone(path, prompts(8), together)


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
