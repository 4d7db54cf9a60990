"""Runs our batch on a simulated machine with a clock of its own: a minute there takes a second
here."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from bench_parts.simulated.forward import forward
from bench_parts.simulated.roofline import Machine, Model, pair, seconds
from mlx_server.engine.messages import Generate
from mlx_server.requests import SamplingParams, Tier
from mlx_server.worker.batch import Batch, StepResult
from mlx_server.worker.costs import StepCosts
from mlx_server.worker.loaded_models import LoadedModels
from mlx_server.worker.prefill.schedule import DEFAULT_SCHEDULE, PrefillBudget, Schedule
from mlx_server.worker.prompt_store import PromptStore

VOCABULARY = 320
GREEDY = SamplingParams(temperature=0)


class Network(nn.Module):  # type: ignore[misc, unused-ignore]
    """A network whose passes only call `take` with the seconds that they would take."""

    def __init__(self, named: str, take: Callable[[float], None]) -> None:
        super().__init__()
        self.layers = [nn.Identity()] * pair(named)[1].layers
        self.lm_head = nn.Identity()
        self._pair, self._take = pair(named), take

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        machine, model = self._pair
        rows, tokens = inputs.shape
        return forward((rows, tokens), cache, VOCABULARY, machine, model, self._take)


class Costs(StepCosts):
    """What our server knows of a step before it has measured the simulated model."""

    def __init__(self, machine: Machine, model: Model) -> None:
        super().__init__(model.products, machine.known_chip)
        self._token = model.kv_bytes

    def token(self, caches: Iterable[Any]) -> float:
        return self._token


@dataclass
class Answer:
    asked: float
    client: str
    times: list[float] = field(default_factory=list)
    computed: int = 0
    """The number of its prompt's tokens that are computed."""
    ended: bool = False

    @property
    def first_token(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.asked

    def between(self, begin: float, end: float) -> list[float]:
        """Returns the gaps between tokens that end in this time."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [b - a for a, b in pairs if begin < b <= end]


class Simulation:
    def __init__(
        self,
        named: str,
        *,
        concurrency: int = 16,
        schedule: Schedule = DEFAULT_SCHEDULE,
        cache_bytes: int = 0,
    ) -> None:
        self.now = 0.0
        """The clock, in seconds."""
        costs = Costs(*pair(named))
        self._models = LoadedModels(
            lambda _, network: Batch(
                network,
                concurrency=concurrency,
                prompts=PromptStore(cache_bytes),
                budget=PrefillBudget(schedule, costs.curve),
                costs=costs,
                clock=lambda: self.now,
            ),
            lambda: self.now,
        )
        self.batch = self._models.add("m", Network(named, self._take))
        self.batch.is_launched_ahead = True
        self.answers: list[Answer] = []
        self.pieces: list[float] = []
        """Seconds of each piece of a prompt."""
        self.steps: list[float] = []
        """Seconds of each step of the rows that decode."""

    def _take(self, seconds: float) -> None:
        self.now += seconds

    def ask(
        self,
        prompt: Iterable[int] | int,
        tokens: int,
        client: str = "",
        adapter: str | None = None,
        *,
        deterministic: bool = False,
        tier: Tier = Tier.DEFAULT,
    ) -> Answer:
        """Adds a request. prompt: its tokens, or their number."""
        number = len(self.answers)
        begun = [number % 200 + 1, number // 200]  # no two of these prompts begin alike
        ids = [*begun, *[7] * (prompt - 2)] if isinstance(prompt, int) else list(prompt)
        asked = Generate(number, "m", ids, tokens, [], GREEDY, client=client, adapter=adapter)
        asked.deterministic, asked.tier = deterministic, tier
        self.batch.add(asked)
        self.answers.append(Answer(self.now, client))
        return self.answers[-1]

    def step(self) -> StepResult:
        before = self.now
        done = self._models.step(self._models.next() or "m")
        if self.now > before:
            (self.pieces if done.progress else self.steps).append(self.now - before)
        for token in done.tokens:
            answer = self.answers[token.row]
            answer.times.append(self.now)
            answer.ended = token.finish is not None
        for progress in done.progress:
            self.answers[progress.row].computed = progress.computed
        return done

    def run(self, until: Answer | None = None) -> None:
        """Runs until the answer has a token; without an answer, until all have ended."""
        while self.batch and not (until and until.times):
            self.step()

    def cancel(self, answer: Answer) -> None:
        self.batch.cancel(self.answers.index(answer))

    def preempt(self, answer: Answer) -> None:
        self.batch.preempt(self.answers.index(answer))

    def resume(self, answer: Answer) -> None:
        self.batch.resume(self.answers.index(answer))


@dataclass(frozen=True)
class LongPrompt:
    """The times of a long prompt next to a row that decodes."""

    alone: float
    first_token: float
    longest_gap: float
    speed: float
    """The decoding row's speed, as a share of its speed alone for as many tokens."""


def long_prompt_next_to_stream(
    named: str, prompt: int = 30_000, schedule: Schedule = DEFAULT_SCHEDULE
) -> LongPrompt:
    alone = Simulation(named, schedule=schedule)
    alone.ask(20, 2)
    alone.run()
    first = alone.ask(prompt, 2)
    alone.run()
    both = Simulation(named, schedule=schedule)
    row = both.ask(300, 100_000)
    while len(row.times) < 60:
        both.step()
    begun = len(row.times)
    long = both.ask(prompt, 2)
    both.run(until=long)
    gaps = row.between(long.asked, both.now)
    undisturbed = Simulation(named, schedule=schedule)
    same = undisturbed.ask(300, begun + len(gaps))
    undisturbed.run()
    own = same.times[-1] - same.times[begun - 1]
    return LongPrompt(first.first_token, long.first_token, max(gaps), own / sum(gaps))


@dataclass(frozen=True)
class CrowdTimes:
    """The times of prompts that arrive together."""

    first_token: float
    """Mean seconds to the first token of all prompts."""
    done: float
    longest_gap: float = 0.0


def crowd(
    named: str,
    tokens: int,
    prompt: int = 2000,
    count: int = 8,
    schedule: Schedule = DEFAULT_SCHEDULE,
) -> CrowdTimes:
    simulation = Simulation(named, schedule=schedule)
    simulation.ask(20, 2)
    simulation.run()
    began = simulation.now
    answers = [simulation.ask(prompt, tokens) for _ in range(count)]
    simulation.run()
    first = sum(answer.first_token for answer in answers) / count
    gaps = [gap for answer in answers for gap in answer.between(began, simulation.now)]
    return CrowdTimes(first, simulation.now - began, max(gaps))


def together_by_mlx_lm(named: str, tokens: int, prompt: int = 2000, count: int = 8) -> CrowdTimes:
    """Computes the same for mlx-lm's BatchGenerator: first all prompts, then steps, without its own
    time."""
    machine, model = pair(named)
    prefill = seconds(machine, model, prompt - 1, [prompt] * count)
    steps = [seconds(machine, model, 1, [prompt + i] * count) for i in range(tokens + 1)]
    return CrowdTimes(prefill + sum(steps[:2]), prefill + sum(steps))


MLX_LM_PIECE = 2048
"""The tokens of a prompt that mlx_lm.server computes at once."""


def alone_by_mlx_lm(named: str, prompt: int = 30_000) -> float:
    """Returns the seconds to a prompt's first token when mlx-lm computes it alone, without its own
    time."""
    machine, model = pair(named)
    ends = [*range(MLX_LM_PIECE, prompt - 1, MLX_LM_PIECE), prompt - 1]
    lengths = [b - a for a, b in pairwise([0, *ends])]
    pieces = (
        seconds(machine, model, length, [end]) for length, end in zip(lengths, ends, strict=True)
    )
    return sum(pieces) + seconds(machine, model, 1, [prompt])
