"""An engine with one model, in the test's own process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_server.engine.messages import (
    Command,
    Generate,
    LoadModel,
    ModelLoaded,
    Prefilled,
    Report,
    RowFailed,
    StepOutput,
)
from mlx_server.prompt_files import PromptFolder
from mlx_server.requests import SamplingParams
from mlx_server.worker.batch import Batch
from mlx_server.worker.engine import Engine

GREEDY = SamplingParams(temperature=0.0)
TOKENS = 12

Answers = dict[int, list[int]]
"""The tokens of each row."""


class Bench:
    def __init__(
        self,
        path: Path,
        cache_bytes: int = 0,
        *,
        disk: PromptFolder | None = None,
        concurrency: int = 8,
        **how: Any,
    ) -> None:
        """how: see LoadModel."""
        self.engine = Engine(concurrency=concurrency, cache_bytes=cache_bytes, disk=disk)
        self.reports: list[Report] = []
        self.rows = 0
        self.cached: dict[int, int] = {}
        """How many tokens of each row's prompt were known."""
        self.failed: dict[int, str] = {}
        self._load = LoadModel("m", str(path), **how)
        self.load()

    def load(self) -> None:
        before = len(self.reports)
        self.handle(self._load)
        self.finish()
        assert any(isinstance(report, ModelLoaded) for report in self.reports[before:])

    @property
    def batch(self) -> Batch:
        return self.engine.models.batches["m"]

    def handle(self, command: Command) -> list[Report]:
        return self._noted(self.engine.handle(command))

    def begin(self, prompt: Sequence[int], tokens: int = TOKENS, **fields: Any) -> int:
        self.rows += 1
        self.handle(Generate(self.rows, "m", list(prompt), tokens, [], GREEDY, **fields))
        return self.rows

    def step(self) -> Answers:
        return self._tokens(self._noted(self.engine.step()))

    def finish(self) -> Answers:
        """Steps until nothing is left to do."""
        before = len(self.reports)
        while self.engine.pause is not None:
            self.step()
        return self._tokens(self.reports[before:])

    def answer(self, prompt: Sequence[int], tokens: int = TOKENS, **fields: Any) -> list[int]:
        row = self.begin(prompt, tokens, **fields)
        return self.finish().get(row, [])

    def together(self, prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[list[int]]:
        rows = [self.begin(prompt, tokens) for prompt in prompts]
        answers = self.finish()
        return [answers[row] for row in rows]

    def _noted(self, reports: list[Report]) -> list[Report]:
        self.reports += reports
        for report in reports:
            match report:
                case Prefilled(row, cached):
                    self.cached[row] = cached
                case RowFailed(row, message):
                    self.failed[row] = message
        return reports

    def _tokens(self, reports: list[Report]) -> Answers:
        answers: Answers = {}
        for report in reports:
            if isinstance(report, StepOutput):
                for token in report.tokens:
                    answers.setdefault(token.row, []).append(token.id)
        return answers
