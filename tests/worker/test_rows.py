"""All rows of the engine, wherever they are: in a batch, or on their way into one."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.engine.messages import (
    Admitted,
    CancelRows,
    Generate,
    Logprobs,
    Prefilled,
    PromptLogprobs,
    StepOutput,
)
from mlx_server.requests import SamplingParams
from mlx_server.worker import rows
from mlx_server.worker.batch import Batch
from mlx_server.worker.engine import Engine
from mlx_server.worker.rows import PIECE, Scoring, prompt_logprobs
from tests.drained import drained
from tests.worker.batch_runs import a_prompt, ids
from tests.worker.engine_runs import (
    GREEDY,
    ask,
    drain,
    failures,
    load,
    of,
    run,
    scored_of,
    tokens,
    tokens_of,
)


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


@pytest.mark.parametrize("prompt", [1, 2, 3 * PIECE])
def test_a_row_may_be_scored_only(engine: Engine, prompt: int) -> None:
    reports = run(engine, ask(0, prompt=prompt, tokens=0, prompt_logprobs=True))
    assert reports[0] == Admitted(0)
    assert len(scored_of(0, reports)) == prompt - 1
    assert tokens_of(0, reports) == []
    assert of(StepOutput, reports)[-1].waiting == 0
    assert engine.pause is None


@pytest.mark.parametrize("prompt", [1, 6, 2 * PIECE + 1])
def test_a_scored_row_goes_on_as_one_that_is_not(engine: Engine, prompt: int) -> None:
    sampling = SamplingParams(temperature=0, logprobs=2)
    reports = run(
        engine,
        ask(0, prompt=prompt, sampling=sampling, prompt_logprobs=True),
        ask(1, prompt=prompt, sampling=sampling),
    )
    assert {len(entry.top) for entry in scored_of(0, reports)} <= {2}
    assert ids(tokens_of(0, reports)) == ids(tokens_of(1, reports))
    assert Prefilled(0, 0) in reports  # scored it was, but not known from before
    first = next(i for i, r in enumerate(reports) if tokens_of(0, [r]))
    assert reports.index(of(PromptLogprobs, reports)[-1]) < first


def test_prompts_are_scored_one_after_the_other(engine: Engine) -> None:
    """Each holds a cache while it is scored, and takes its time from the rows that decode."""
    for row in (0, 1, 2):
        engine.handle(ask(row, prompt=2 * PIECE + 1, tokens=0, prompt_logprobs=True))
    pieces = [piece for _ in range(9) for piece in of(PromptLogprobs, engine.step())]
    assert [piece.row for piece in pieces] == [0, 0, 1, 1, 2, 2]
    assert {len(piece.logprobs) for piece in pieces} == {PIECE}  # few, as they come in one message


def test_scoring_leaves_the_rows_that_decode_their_steps(engine: Engine) -> None:
    engine.handle(ask(0, tokens=50))
    for _ in range(3):
        engine.step()
    engine.handle(ask(1, prompt=3 * PIECE, tokens=0, prompt_logprobs=True))
    assert len(tokens_of(0, engine.step() + engine.step())) == 2
    assert engine.pause == 0


def test_a_scoring_that_fails_fails_alone(
    engine: Engine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Scoring:
        yield []
        raise MemoryError("no room")

    engine.handle(ask(0))
    monkeypatch.setattr(rows, "prompt_logprobs", fails)
    reports = run(engine, ask(1, prompt_logprobs=True))
    assert failures(reports) == {1: "MemoryError: no room"}
    assert ids(tokens_of(0, reports)) == answer


def test_clients_take_turns_with_their_scorings(tiny_path: Path) -> None:
    """One that comes later waits for a piece of each other client's, and not for their ends."""
    engine = Engine()
    load(engine, tiny_path)
    long: dict[str, Any] = {"prompt": 8 * PIECE, "tokens": 0, "prompt_logprobs": True}
    scorings = [
        ask(0, client="many", **long),
        ask(1, client="many", **long),
        ask(2, client="late", **{**long, "prompt": 2 * PIECE}),
    ]
    pieces = [piece.row for piece in of(PromptLogprobs, run(engine, *scorings))]
    assert pieces[:4] == [0, 2, 0, 2]
    assert pieces[4:] == sorted(pieces[4:])


BEYOND = 320


def named(command: Generate) -> str:
    """The name of a case."""
    unusual = {k: v for k, v in asdict(command.sampling).items() if v != getattr(GREEDY, k)}
    return f"{command.prompt[:2]} {command.max_tokens} {unusual or ''}"


@pytest.mark.slow
@pytest.mark.parametrize("score", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ask(0, prompt=0),
        ask(0, tokens=-1),
        ask(0, sampling=SamplingParams(logit_bias={BEYOND: 1.0})),
        ask(0, sampling=SamplingParams(logit_bias={-1: 1.0})),
        Generate(0, "tiny", [5, BEYOND, 5], 5, [], GREEDY),
        Generate(0, "tiny", [5, -1], 5, [], GREEDY),
        Generate(0, "tiny", [5, BEYOND], 5, [], SamplingParams(presence_penalty=1.0)),
        ask(0, sampling=SamplingParams(temperature=math.nan)),
        ask(0, sampling=SamplingParams(temperature=math.inf)),
        ask(0, sampling=SamplingParams(temperature=-1.0)),
        ask(0, sampling=SamplingParams(top_k=-1)),
        ask(0, sampling=SamplingParams(top_p=-0.1)),
        ask(0, sampling=SamplingParams(min_p=-0.1)),
        ask(0, sampling=SamplingParams(min_p=1.1)),
        ask(0, sampling=SamplingParams(repetition_penalty=0.0)),
        ask(0, sampling=SamplingParams(frequency_penalty=math.inf)),
        ask(0, sampling=SamplingParams(logit_bias={3: math.inf})),
        ask(0, sampling=SamplingParams(logprobs=-1)),
        ask(0, forced_tokens=[1, 2]),  # of a model that plays none
        ask(0, forced_tokens=[]),
        ask(0, delay=-1.0),
        ask(0, delay=math.nan),
        ask(0, delay=math.inf),
    ],
    ids=named,
)
def test_what_can_not_be_done_fails_alone(
    engine: Engine, answer: list[int], command: Generate, score: bool
) -> None:
    """MLX itself would read and write past the end of an array."""
    command.prompt_logprobs = score
    reports = run(engine, command, ask(1))
    assert list(failures(reports)) == [0]
    assert tokens_of(0, reports) == []
    assert of(PromptLogprobs, reports) == []
    assert ids(tokens_of(1, reports)) == answer


def test_a_row_of_no_tokens_that_is_not_scored_fails(engine: Engine) -> None:
    assert list(failures(run(engine, ask(0, tokens=0)))) == [0]


LENGTHS = [1, 2, 3, PIECE - 1, PIECE, PIECE + 1, PIECE + 2, 2 * PIECE + 1, 3 * PIECE - 20]


def scored(model: Any, prompt: list[int], top: int) -> tuple[list[Logprobs], list[Any], int]:
    """What `score` returns, and in how many pieces it got there."""
    last, pieces = drained(prompt_logprobs(model, prompt, top))
    return [entry for piece in pieces for entry in piece], last, len(pieces)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_log_probabilities_are_those_of_one_full_pass(tiny_model: Any, length: int) -> None:
    prompt = a_prompt(length)
    found, _, pieces = scored(tiny_model, prompt, top=3)
    assert pieces == -(-(length - 1) // PIECE)

    logits = tiny_model(mx.array([prompt]))[0]
    exact = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for entry, row, token in zip(found, exact[:-1], prompt[1:], strict=True):
        assert entry.chosen == pytest.approx(row[token], abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx(
            sorted(row.tolist(), reverse=True)[:3], abs=1e-3
        )
        assert [row[id] for id, _ in entry.top] == pytest.approx(
            [value for _, value in entry.top], abs=1e-3
        )


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=3, repetition_penalty=1.4, frequency_penalty=0.3),
    ],
    ids=["greedy", "penalised"],
)
def test_its_cache_goes_on_as_the_prompt_would(
    tiny_model: Any, length: int, sampling: SamplingParams
) -> None:
    prompt = a_prompt(length)
    _, cache, _ = scored(tiny_model, prompt, top=0)
    batch = Batch(tiny_model, concurrency=4)
    batch.add(Generate(0, "m", prompt, 10, [], sampling), cache)
    batch.add(Generate(1, "m", prompt, 10, [], sampling))
    answers: dict[int, list[int]] = {0: [], 1: []}
    while batch:
        for token in batch.step().tokens:
            answers[token.row].append(token.id)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 10
