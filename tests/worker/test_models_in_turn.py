"""Several models in one engine, by the clock of a simulated machine: who waits for whom."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from mlx_server.engine.messages import Generate, StepOutput
from mlx_server.worker.engine import Engine
from tests.worker.simulated import GREEDY, Network

PAIR = "m4-max:gpt-oss-20b"
MODELS = "abcd"
STREAM = 0
LONGEST_GAP = 0.4


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Models:
    """An engine with several models; model "a" streams."""

    count: int
    clock: Clock = field(default_factory=Clock)
    times: dict[int, list[float]] = field(default_factory=dict)
    """When each row had a token."""

    def __post_init__(self) -> None:
        self.engine = Engine(clock=self.clock)
        for model in MODELS[: self.count]:
            network = Network(PAIR, self.clock.advance)
            self.engine._models.add(model, network)
        for row, model in enumerate(MODELS[: self.count], 100):
            self.ask(row, model, 300, 3)
            self.run_until(row, 3)
        self.ask(STREAM, "a", 300, 1_000_000)
        self.run_until(STREAM, 60)

    def ask(self, row: int, model: str, prompt: int, tokens: int) -> None:
        self.times[row] = []
        ids = [row % 200 + 1, *[7] * (prompt - 1)]
        self.engine._admission.add(Generate(row, model, ids, tokens, [], GREEDY, client=str(row)))

    def run_until(self, row: int, tokens: int) -> None:
        while len(self.times[row]) < tokens:
            for report in self.engine.step():
                if isinstance(report, StepOutput):
                    for token in report.tokens:
                        self.times[token.row].append(self.clock.now)

    def gap(self, since: float) -> float:
        """The longest of the stream."""
        times = self.times[STREAM]
        return max(b - a for a, b in pairwise(times) if b > since)


@pytest.mark.tables
@pytest.mark.parametrize(("prompt", "tokens"), [(10_000, 1), (300, 300)])
@pytest.mark.parametrize("own_prompt", [False, True])
@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_stream_waits_for_one_piece_however_many_models_work(
    others: int, own_prompt: bool, prompt: int, tokens: int
) -> None:
    models = Models(1 + others)
    began = models.clock.now
    if own_prompt:
        models.ask(50, "a", 30_000, 8)
    for row, model in enumerate(MODELS[1 : 1 + others], 1):
        models.ask(row, model, prompt, tokens)
    for row in range(1, 1 + others):
        models.run_until(row, tokens)
    assert models.gap(began) <= LONGEST_GAP
