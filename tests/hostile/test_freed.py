"""A cancelled row's memory is back when the next step is done, whatever state it was in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.engine.messages import CancelRows, PauseRows, Report, StepOutput
from mlx_server.worker.batch import Batch
from mlx_server.worker.engine import Engine
from tests.worker.batch_runs import Steady
from tests.worker.constrained_decoding.grammars import DIGITS, loaded
from tests.worker.constrained_decoding.test_grammar_compiler import gate
from tests.worker.engine_runs import ask, of, tokens_of, until

__all__ = ["gate"]

ROW, PROMPT = 1, 800
KV_BYTES = PROMPT * 2 * 2 * 2 * 16 * 4
"""Of its prompt: layers, keys and values, heads, their width, and float32."""
SLACK = KV_BYTES // 10


@pytest.fixture
def engine(tiny_path: Path) -> Engine:
    """With a row that decodes."""
    made = loaded(tiny_path, concurrency=2)
    made.handle(ask(0, prompt=40, tokens=2000))
    until(made, lambda reports: len(tokens_of(0, reports)) == 3)
    return made


def begin(engine: Engine, **more: Any) -> Batch:
    engine.handle(ask(ROW, prompt=PROMPT, tokens=500, **more))
    return engine._batches["tiny"]


def waiting(engine: Engine) -> None:
    engine.handle(ask(2, prompt=40, tokens=2000))
    until(engine, lambda reports: bool(tokens_of(2, reports)))
    batch = begin(engine)
    engine.step()
    assert len(batch._turns) == 1


def compiling(engine: Engine) -> None:
    begin(engine, grammar=DIGITS)
    engine.step()
    assert [*engine._admission.waiting] == [ROW]


def scored(engine: Engine) -> None:
    begin(engine, prompt_logprobs=True)
    engine.step()
    assert [*engine._admission._scored] == [ROW]


def prefilled(engine: Engine) -> None:
    batch = begin(engine)
    batch._budget = Steady(PROMPT // 4)
    until(engine, lambda _: batch._group is not None and batch._group.left < PROMPT // 2)


def decoding(engine: Engine) -> None:
    begin(engine)
    until(engine, lambda reports: len(tokens_of(ROW, reports)) == 3)


def held(engine: Engine) -> None:
    decoding(engine)
    engine.handle(PauseRows([ROW]))
    engine.step()
    assert len(engine._batches["tiny"]._kept_decode) == 1


def of_nobody(engine: Engine) -> int:
    """Memory but for the caches of the rows that decode, which grow."""
    mx.synchronize()
    caches = engine._batches["tiny"]._decoder.caches
    return mx.get_active_memory() - sum(int(cache.nbytes) for cache in caches)


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("reach", [waiting, compiling, scored, prefilled, decoding, held])
def test_one_step_after_a_cancel(engine: Engine, reach: Callable[[Engine], None]) -> None:
    before = of_nobody(engine)
    reach(engine)
    during = mx.get_active_memory()
    engine.handle(CancelRows([ROW]))
    engine.step()
    assert ROW not in engine._batches["tiny"].rows
    assert not engine._admission
    assert not engine._rows.paused
    assert of_nobody(engine) - before < SLACK
    if reach in (prefilled, decoding, held):
        assert during - mx.get_active_memory() > KV_BYTES // 4
    following = [token for report in of(StepOutput, drained(engine)) for token in report.tokens]
    assert {token.row for token in following} <= {0, 2}


def drained(engine: Engine) -> list[Report]:
    engine.handle(CancelRows([2]))
    return [report for _ in range(5) for report in engine.step()]
