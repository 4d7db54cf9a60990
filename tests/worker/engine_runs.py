"""Runs an engine in the test's own process: commands in, reports out."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import pytest

from mlx_server.engine.messages import (
    Generate,
    Grammar,
    LoadModel,
    Logprobs,
    PromptLogprobs,
    Report,
    RowFailed,
    StepOutput,
    Token,
)
from mlx_server.requests import SamplingParams
from mlx_server.worker.engine import Engine
from tests.worker.batch_runs import a_prompt

Kind = TypeVar("Kind", bound=Report)

GREEDY = SamplingParams(temperature=0)


def grammar_of(source: str | None) -> Grammar | None:
    """The grammar with this source in Lark, whose last rule may be a schema."""
    if source is None:
        return None
    rules, _, schema = source.partition("j0: %json ")
    return Grammar(rules, (("j0", schema.strip()),) if schema else ())


def ask(
    row: int,
    *,
    model: str = "tiny",
    prompt: int = 6,
    tokens: int = 5,
    grammar: str | None = None,
    **rest: Any,
) -> Generate:
    fields: dict[str, Any] = {"stop_tokens": [], "sampling": GREEDY, **rest}
    fields["grammar"] = grammar_of(grammar)
    return Generate(row=row, model=model, prompt=a_prompt(prompt), max_tokens=tokens, **fields)


def drain(engine: Engine) -> list[Report]:
    reports: list[Report] = []
    while engine.pause is not None:
        reports += engine.step()
    return reports


def run(engine: Engine, *asks: Generate) -> list[Report]:
    reports = [report for command in asks for report in engine.handle(command)]
    return reports + drain(engine)


def until(engine: Engine, true: Callable[[list[Report]], bool]) -> list[Report]:
    """Steps until that is true of what was reported; none of these tests takes this long."""
    reports: list[Report] = []
    for _ in range(2000):
        if true(reports):
            return reports
        reports += engine.step()
    pytest.fail("it never came to that")


def of(kind: type[Kind], reports: list[Report]) -> list[Kind]:
    return [report for report in reports if isinstance(report, kind)]


def scored_of(row: int, reports: list[Report]) -> list[Logprobs]:
    """The log probabilities of its prompt, of all pieces."""
    pieces = (piece.logprobs for piece in of(PromptLogprobs, reports) if piece.row == row)
    return [entry for logprobs in pieces for entry in logprobs]


def tokens_of(row: int, reports: list[Report]) -> list[Token]:
    return [token for token in tokens(reports) if token.row == row]


def tokens(reports: list[Report]) -> list[Token]:
    return [token for step in of(StepOutput, reports) for token in step.tokens]


def failures(reports: list[Report]) -> dict[int, str]:
    failed = [report for report in of(RowFailed, reports) if report.error in ("", "EngineDied")]
    return {report.row: report.message for report in failed}


def load(engine: Engine, path: Path, model: str = "tiny") -> list[Report]:
    engine.handle(LoadModel(model, str(path)))
    return drain(engine)


def active_memory() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()
