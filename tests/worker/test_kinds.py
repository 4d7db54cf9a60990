"""Every kind of cache and of weights loads, batches, cancels, and is cached without being wrong."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_server.engine.messages import (
    Generate,
    LoadModel,
    ModelLoaded,
    Prefilled,
    Report,
    StepOutput,
)
from mlx_server.requests import SamplingParams
from mlx_server.worker.engine import Engine
from tests.worker.kinds import KINDS, Kind
from tests.worker.lora_files import network
from tests.worker.one_pass import expected

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0)
TOKENS = 12
WINDOW = 32
"""Of the kinds that have one; prompts on both sides of it, and answers that cross it."""

CACHES = [kind for kind in KINDS if not kind.name.startswith("llama-")]
"""One of each kind of cache: how weights are kept makes no difference to it."""

Answers = dict[int, list[int]]


class Bench:
    """One engine with one model, driven in-process."""

    def __init__(self, path: Path, cache_bytes: int = 0, most_padding: int | None = None) -> None:
        self.engine = Engine(concurrency=8, cache_bytes=cache_bytes)
        self.cached: dict[int, int] = {}
        self._next = 0
        load = LoadModel("m", str(path), most_padding=most_padding)
        reports = [*self.engine.handle(load), *self._until_idle()]
        assert any(isinstance(report, ModelLoaded) for report in reports), reports

    def begin(self, prompt: Sequence[int], tokens: int = TOKENS, **fields: Any) -> int:
        self._next += 1
        self.engine.handle(Generate(self._next, "m", list(prompt), tokens, [], GREEDY, **fields))
        return self._next

    def step(self) -> Answers:
        answers: Answers = {}
        for report in self.engine.step():
            if isinstance(report, StepOutput):
                for token in report.tokens:
                    answers.setdefault(token.row, []).append(token.id)
            elif isinstance(report, Prefilled):
                self.cached[report.row] = report.cached_tokens
        return answers

    def finish(self) -> Answers:
        answers: Answers = {}
        while self.engine.pause is not None:
            for row, tokens in self.step().items():
                answers.setdefault(row, []).extend(tokens)
        return answers

    def answer(self, prompt: Sequence[int], tokens: int = TOKENS) -> list[int]:
        row = self.begin(prompt, tokens)
        return self.finish()[row]

    def _until_idle(self) -> list[Report]:
        reports: list[Report] = []
        while self.engine.pause is not None:
            reports += self.engine.step()
        return reports


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
    rows = [bench.begin(prompt) for prompt in prompts(8)]
    finished = bench.finish()
    together = [finished[row] for row in rows]
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
    rows = [bench.begin(prompt) for prompt in asked]
    finished = bench.finish()
    together = [finished[row] for row in rows]
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
