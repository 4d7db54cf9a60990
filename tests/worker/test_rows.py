"""All rows of the engine, wherever they are: in a batch, or on their way into one."""

from pathlib import Path

from mlx_server.engine.messages import Admitted, CancelRows, PromptLogprobs, StepOutput
from mlx_server.worker.engine import Engine
from mlx_server.worker.rows import PIECE
from tests.worker.batch_runs import ids
from tests.worker.engine_runs import ask, drain, failures, load, of, run, tokens, tokens_of, until


def test_a_row_for_a_model_that_is_not_loaded_fails(engine: Engine) -> None:
    reports = run(engine, ask(0, model="absent"), ask(1))
    assert "absent" in failures(reports)[0]
    assert of(Admitted, reports) == [Admitted(1)]
    assert len(tokens_of(1, reports)) == 5


def test_cancel_frees_rows_wherever_they_are(engine: Engine, answer: list[int]) -> None:
    for row in range(4):
        engine.handle(ask(row, tokens=1000))
    engine.handle(ask(4))  # waits for a place
    engine.handle(ask(5, prompt=3 * PIECE, prompt_logprobs=True))
    for _ in range(4):
        engine.step()
    assert engine.handle(CancelRows([0, 2, 3, 5])) == []
    engine.handle(CancelRows([1]))
    reports = drain(engine)
    assert ids(tokens_of(4, reports)) == answer
    assert {token.row for token in tokens(reports)} == {4}
    assert of(PromptLogprobs, reports) == []


def test_cancelling_rows_unknown_or_finished_is_harmless(engine: Engine, answer: list[int]) -> None:
    engine.handle(CancelRows([17, -1]))
    run(engine, ask(0))
    engine.handle(CancelRows([0]))
    engine.handle(ask(1))
    engine.handle(CancelRows([0, 0]))
    assert ids(tokens_of(1, drain(engine))) == answer


def test_the_last_report_of_the_waiting_says_none(engine: Engine) -> None:
    """Also when those that waited were cancelled, so that no step follows."""
    for row in range(6):
        engine.handle(ask(row, tokens=1000))
    engine.handle(ask(6, prompt=3 * PIECE, prompt_logprobs=True))
    assert of(StepOutput, engine.step())[0].waiting == 3
    (last,) = engine.handle(CancelRows(list(range(7))))
    assert isinstance(last, StepOutput)
    assert (last.tokens, last.waiting) == ([], 0)
    assert engine.pause is None


def test_waiting_counts_the_rows_of_all_models(engine: Engine, tiny_path: Path) -> None:
    load(engine, tiny_path, "second")
    for row in range(7):
        engine.handle(ask(row, tokens=1000))
    for row in range(7, 12):
        engine.handle(ask(row, tokens=1000, model="second"))
    reports = until(engine, lambda reports: {0, 7} <= {t.row for t in tokens(reports)})
    assert of(StepOutput, reports)[-1].waiting == 3 + 1
