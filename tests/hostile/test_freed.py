"""A cancelled row's memory is back when the next step is done, whatever state it was in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.engine.messages import CancelRows, PauseRows, PrefillProgress, Report, StepOutput
from mlx_server.worker.engine import Engine
from tests.worker.constrained_decoding.grammars import DIGITS, loaded
from tests.worker.constrained_decoding.test_grammar_compiler import gate
from tests.worker.engine_runs import ask, of, tokens_of, until

__all__ = ["gate"]

ROW, OTHER, PROMPT = 1, 2, 800
KV_BYTES = PROMPT * 2 * 2 * 2 * 16 * 4
"""Of its prompt: layers, keys and values, heads, their width, and float32."""
SLACK = KV_BYTES * 256 // PROMPT
"""The room in a cache of a row that decodes all the time: mlx-lm's grow by 256 tokens."""


@pytest.fixture
def engine(tiny_path: Path) -> Engine:
    """With a row that decodes."""
    made = loaded(tiny_path, concurrency=2)
    made.handle(ask(0, prompt=40, tokens=2000))
    until(made, lambda reports: len(tokens_of(0, reports)) == 3)
    return made


def begin(engine: Engine, **more: Any) -> None:
    engine.handle(ask(ROW, prompt=PROMPT, tokens=500, **more))


def waiting(engine: Engine) -> None:
    engine.handle(ask(OTHER, prompt=40, tokens=2000))
    until(engine, lambda reports: bool(tokens_of(OTHER, reports)))
    begin(engine)
    engine.step()


def compiling(engine: Engine) -> None:
    begin(engine, grammar=DIGITS)
    engine.step()


def scored(engine: Engine) -> None:
    begin(engine, prompt_logprobs=True)
    engine.step()


def prefilled(engine: Engine) -> None:
    begin(engine)
    until(engine, lambda reports: bool(of(PrefillProgress, reports)))


def decoding(engine: Engine) -> None:
    begin(engine)
    until(engine, lambda reports: len(tokens_of(ROW, reports)) == 3)


def held(engine: Engine) -> None:
    decoding(engine)
    engine.handle(PauseRows([ROW]))
    engine.step()


def used() -> int:
    mx.synchronize()
    return mx.get_active_memory()


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("reach", [waiting, compiling, scored, prefilled, decoding, held])
def test_one_step_after_a_cancel(engine: Engine, reach: Callable[[Engine], None]) -> None:
    before = used()
    reach(engine)
    during = mx.get_active_memory()
    engine.handle(CancelRows([ROW, OTHER]))
    engine.step()
    assert used() - before < SLACK
    if reach in (prefilled, decoding, held):
        assert during - mx.get_active_memory() > KV_BYTES // 4
    following = [token for report in of(StepOutput, drained(engine)) for token in report.tokens]
    assert {token.row for token in following} == {0}


def drained(engine: Engine) -> list[Report]:
    return [report for _ in range(5) for report in engine.step()]
