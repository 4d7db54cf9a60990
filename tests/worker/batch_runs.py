"""Runs batches of rows in the test's own process."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from mlx_server.engine.messages import Generate, Token
from mlx_server.requests import SamplingParams, Tier
from mlx_server.worker.batch import Batch, StepResult
from mlx_server.worker.decode_groups import PrefillBatch
from mlx_server.worker.prefill.schedule import PrefillBudget, PrefillPiece, Schedule
from mlx_server.worker.prompt_store import PromptStore
from tests.tiny import TOKENS

GREEDY = SamplingParams(temperature=0)
PIECE = 128
"""Tokens of a prompt that a test's batch prefills in one step."""

CLOSE = 1e-4
"""Log probabilities nearer than this tie: a batch's float noise may choose either."""


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    max_tokens: int = 12
    stop_tokens: tuple[int, ...] = ()
    sampling: SamplingParams = GREEDY
    script: tuple[int, ...] | None = None
    client: str = ""


def a_prompt(length: int, seed: int = 0) -> list[int]:
    dice = random.Random(f"{length} {seed}")
    return [dice.randrange(TOKENS) for _ in range(length)]


class Steady(PrefillBudget):
    """Pieces of one size, whatever they take, and a step before each."""

    def __init__(self, size: int) -> None:
        super().__init__(Schedule())
        self.size = size
        self._has_stepped = False

    def piece(self, decoding: int, *sizes: int, **options: float) -> int:
        return self.size if self._has_stepped or not decoding else 0

    def stepped(self, decoding: int, seconds: float) -> None:
        self._has_stepped = True

    def prefilled(self, piece: PrefillPiece | None, decoding: int, seconds: float) -> None:
        self._has_stepped = False


class Run:
    """A batch, and what its rows have been given so far."""

    def __init__(
        self, model: Any, *, concurrency: int = 16, piece: int = PIECE, cache_bytes: int = 0
    ) -> None:
        self.budget = Steady(piece)
        self.batch = Batch(
            model,
            concurrency=concurrency,
            prompts=PromptStore(cache_bytes),
            budget=self.budget,
        )
        self.answers: dict[int, list[Token]] = {}
        self.cached: dict[int, int] = {}
        """Of each row whose turn has come, how much of its prompt was known."""
        self.progress: dict[int, list[int]] = {}
        """Of each row, how much of its prompt was computed after each piece."""

    def join(self, number: int, ask: Ask) -> None:
        self.answers[number] = []
        asked = Generate(
            number, "m", ask.prompt, ask.max_tokens, list(ask.stop_tokens), ask.sampling
        )
        asked.forced_tokens = list(ask.script) if ask.script else None
        asked.client = ask.client
        self.batch.add(asked)

    def step(self) -> StepResult:
        """A token for every row, and a piece of the next prompt."""
        done = self.batch.step()
        if done.tokens and not done.progress and self.batch.next_prompt(Tier.DEFAULT):
            piece = self.batch.step()
            done.tokens += piece.tokens  # if a row that was set aside took the last place
            done.prefilled, done.progress = piece.prefilled, piece.progress
        for progress in done.progress:
            self.progress.setdefault(progress.row, []).append(progress.computed)
        for prefilled in done.prefilled:
            assert prefilled.row not in self.cached
            self.cached[prefilled.row] = prefilled.cached_tokens
        for token in done.tokens:
            self.answers[token.row].append(token)
        return done

    def until_decoding(self) -> None:
        while self.batch.waiting:
            self.step()

    def finish(self) -> None:
        while self.batch:
            self.step()

    @property
    def stages(self) -> tuple[int, int, int]:
        """How many rows wait, are in prefill, decode."""
        prefilling = len(self.batch.prefilling)
        return self.batch.waiting - prefilling, prefilling, self.batch.decoding

    def assert_nothing_is_left(self) -> None:
        assert self.stages == (0, 0, 0)
        assert not self.batch
        assert self.batch.waiting == 0
        assert not self.batch.rows
        assert not self.batch.decoding
        assert self.batch.step() == StepResult()


def together(model: Any, asks: Sequence[Ask], *, concurrency: int = 16) -> list[list[Token]]:
    run = Run(model, concurrency=concurrency)
    for number, ask in enumerate(asks):
        run.join(number, ask)
    run.finish()
    return list(run.answers.values())


def alone(model: Any, ask: Ask) -> list[Token]:
    (answer,) = together(model, [ask])
    return answer


def ids(answer: Sequence[Token]) -> list[int]:
    return [token.id for token in answer]


MIXED = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(seed=3, min_p=0.05, logprobs=4),
    SamplingParams(seed=4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(temperature=0, frequency_penalty=1.5, logprobs=0),
    SamplingParams(seed=-5, temperature=1.6, logit_bias={7: 3.0, 8: -100.0}),
    SamplingParams(temperature=0, logit_bias={300: 4.0}, logprobs=2),
]


def come_and_go(run: Run, asks: Sequence[Any], dice: random.Random) -> dict[int, int]:
    """Rows join and some are cancelled at random: of each of these, how many tokens it got."""
    cancelled: dict[int, int] = {}
    while run.batch or len(run.answers) < len(asks):
        while len(run.answers) < len(asks) and dice.random() < 0.4:
            run.join(len(run.answers), asks[len(run.answers)])
        if run.batch and dice.random() < 0.15:
            victim = dice.choice(run.batch.rows)
            run.batch.cancel(victim)
            cancelled[victim] = len(run.answers[victim])
        run.step()
    assert cancelled
    return cancelled


LENGTHS = [1, 2, 9, 40, PIECE, PIECE + 1, PIECE + 2, 2 * PIECE + 30]


def computed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Fills with how many tokens of each row every piece computes, without the last of a prompt."""
    pieces: list[list[int]] = []
    prompt, end = PrefillBatch.prompt, PrefillBatch.end

    def counted(self: PrefillBatch, tokens: list[list[int]]) -> None:
        pieces.append([len(row) for row in tokens])
        prompt(self, tokens)

    def ended(self: PrefillBatch, tokens: list[list[int]], heads: Collection[int]) -> None:
        pieces.append([len(row) - 1 for row in tokens])
        end(self, tokens, heads)

    monkeypatch.setattr(PrefillBatch, "prompt", counted)
    monkeypatch.setattr(PrefillBatch, "end", ended)
    return pieces
