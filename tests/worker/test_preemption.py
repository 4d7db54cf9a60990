"""Rows that give their caches back and go on later, with the tokens of rows that never did."""

import random
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msgspec import structs

from mlx_server.engine.messages import (
    Admitted,
    Generate,
    LoadModel,
    PreemptRows,
    Prefilled,
    PromptLogprobs,
    ResumeRows,
    RowFailed,
    Thinking,
    Token,
    UnloadModel,
)
from mlx_server.requests import SamplingParams
from mlx_server.worker.engine import Engine
from mlx_server.worker.replay_model import ReplayModel
from tests.worker.batch_runs import GREEDY, MIXED, PIECE, Ask, Run, a_prompt, alone, ids
from tests.worker.constrained_decoding.grammars import ENDS, GRAMMARS
from tests.worker.engine_runs import ask, drain, of, run, tokens_of

LENGTHS = (2, 9, 40, PIECE, PIECE + 30, 2 * PIECE, 5, 17)
SEEDED = [
    Ask(a_prompt(length, seed=3), max_tokens=12 + 3 * n, sampling=replace(params, seed=n))
    for n, (length, params) in enumerate(zip(LENGTHS, MIXED, strict=True))
]


@pytest.fixture(scope="module")
def seeded_alone(tiny_model: Any) -> list[list[Token]]:
    return [alone(tiny_model, each) for each in SEEDED]


def assert_as_alone(run: Run, answers: Iterable[list[Token]]) -> None:
    for number, expected in enumerate(answers):
        assert ids(run.answers[number]) == ids(expected), number
        for token, wanted in zip(run.answers[number], expected, strict=True):
            assert (token.logprobs is None) == (wanted.logprobs is None)
            if token.logprobs and wanted.logprobs:
                assert token.logprobs.chosen == pytest.approx(wanted.logprobs.chosen, abs=1e-3)


def steps(run: Run, count: int) -> None:
    for _ in range(count):
        run.step()


def test_what_is_preempted_holds_no_memory(tiny_model: Any) -> None:
    run = Run(tiny_model)
    run.join(0, Ask(a_prompt(900), max_tokens=40, sampling=GREEDY))
    run.until_decoding()
    steps(run, 3)
    caches = run.batch.decoder.place(0)[0].prompt_cache
    mx.eval([cache.state for cache in caches])
    held = sum(cache.nbytes for cache in caches)
    del caches
    before = mx.get_active_memory()
    run.batch.preempt(0)
    assert before - mx.get_active_memory() >= 0.9 * held > 0
    assert not run.batch
    assert run.batch.rows == [0]


@pytest.mark.parametrize("stage", ["waiting", "prefilling", "decoding", "going on"])
def test_what_is_preempted_can_be_cancelled(tiny_model: Any, stage: str) -> None:
    run = Run(tiny_model, piece=50)
    run.join(0, Ask(a_prompt(3 * PIECE), max_tokens=6, sampling=GREEDY))
    if stage != "waiting":
        run.step()
    if stage in ("decoding", "going on"):
        run.until_decoding()
        run.step()
    run.batch.preempt(0)
    if stage == "going on":
        run.batch.resume(0)
        run.step()
        run.batch.preempt(0)
    run.batch.cancel(0)
    run.batch.resume(0)
    run.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_at_any_time_and_in_any_order(
    tiny_model: Any, seeded_alone: list[list[Token]], seed: int
) -> None:
    dice = random.Random(seed)
    run = Run(
        tiny_model,
        concurrency=dice.choice([2, 4, 16]),
        piece=48,
        cache_bytes=dice.choice([0, 1 << 18, 1 << 30]),
    )
    away: list[int] = []
    joined = 0
    while joined < len(SEEDED) or run.batch.rows:
        if joined < len(SEEDED) and dice.random() < 0.3:
            run.join(joined, SEEDED[joined])
            joined += 1
        if run.batch.rows and dice.random() < 0.3:
            run.batch.preempt(number := dice.choice(run.batch.rows))
            away = sorted({*away, number})
        if away and dice.random() < 0.4:
            run.batch.resume(away.pop(dice.randrange(len(away))))
        if run.batch:
            run.step()
        assert not {row.number for row in run.batch.decoder.rows} & {*away}
    assert_as_alone(run, seeded_alone)
    run.assert_nothing_is_left()


def test_what_was_recorded_is_played_on() -> None:
    model = ReplayModel(320)
    asks = [Ask(a_prompt(9), 40, script=tuple(a_prompt(30, seed=n))) for n in range(2)]
    run = Run(model)
    for number, each in enumerate(asks):
        run.join(number, each)
    steps(run, 8)
    run.batch.preempt(0)
    steps(run, 3)
    run.batch.resume(0)
    run.finish()
    for number, each in enumerate(asks):
        assert ids(run.answers[number])[:30] == list(each.script or ())


def guided(path: Path, prompt_cache: int) -> Engine:
    engine = Engine(cache_bytes=prompt_cache)
    engine.handle(LoadModel("tiny", str(path), ENDS))
    drain(engine)
    return engine


def every_kind() -> list[Generate]:
    thinking = Thinking(6, inside=True, opens=[b"<think>"], closes=[b"</think>"], end=[5, 6, 7])
    return [
        *(ask(row, grammar=each, tokens=40, stop_tokens=ENDS) for row, each in enumerate(GRAMMARS)),
        ask(3, thinking=thinking, tokens=30, stop_tokens=ENDS),
        ask(4, prompt_logprobs=True, tokens=20, sampling=SamplingParams(temperature=0, logprobs=2)),
        ask(5, tokens=20, sampling=SamplingParams(seed=5, presence_penalty=1.0)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("prompt_cache", [0, 1 << 30], ids=["recomputed", "kept"])
def test_grammars_scores_and_budgets_go_on_too(tiny_path: Path, prompt_cache: int) -> None:
    asks = every_kind()
    expected = run(guided(tiny_path, 0), *deepcopy(asks))
    engine = guided(tiny_path, prompt_cache)
    reports = [report for each in asks for report in engine.handle(each)]
    for turn in range(200):
        if turn < 60:
            engine.handle(PreemptRows([turn % 6]))
        if turn > 3:
            engine.handle(ResumeRows([(turn - 4) % 6]))
        reports += engine.step()
    reports += drain(engine)
    assert not of(RowFailed, reports)
    for row in range(6):
        assert ids(tokens_of(row, reports)) == ids(tokens_of(row, expected))
        assert tokens_of(row, reports)[-1].finish
    assert len(of(PromptLogprobs, reports)) == 1
    assert sorted(report.row for report in of(Admitted, reports)) == list(range(6))
    assert sorted(report.row for report in of(Prefilled, reports)) == list(range(6))


def test_another_engine_goes_on_where_one_has_ended(tiny_path: Path) -> None:
    """Whatever a row asked for, and after any of its tokens."""
    drawn = SamplingParams(temperature=0.9, frequency_penalty=0.5, repetition_penalty=1.2)
    asks = [
        *every_kind(),
        ask(6, tokens=24, sampling=replace(drawn, seed=1), deterministic=True),
        ask(7, tokens=24, sampling=drawn, own_seed=2**63),
        ask(8, tokens=60, loops=2, grammar=GRAMMARS[0], stop_tokens=ENDS, prompt=3 * PIECE),
    ]
    expected = run(guided(tiny_path, 0), *deepcopy(asks))
    answers = [tokens_of(each.row, expected) for each in asks]
    another = guided(tiny_path, 1 << 30)
    for cut in (1, 2, 5, 9, 17, 29):
        left = [each for each in asks if len(answers[each.row]) > cut]
        assert left
        reports = run(
            another,
            *(
                structs.replace(each, generated=ids(answers[each.row])[:cut], prompt_logprobs=False)
                for each in deepcopy(left)
            ),
        )
        for each in left:
            rest = tokens_of(each.row, reports)
            assert ids(rest) == ids(answers[each.row])[cut:], (each.row, cut)
            assert rest[-1].finish == answers[each.row][-1].finish


def test_what_is_preempted_fails_with_its_model(tiny_path: Path) -> None:
    engine = guided(tiny_path, 0)
    run(engine, ask(0, tokens=2))
    engine.handle(ask(1, tokens=500))
    engine.step()
    engine.handle(PreemptRows([1, 77]))
    assert engine.pause is None
    assert [report.row for report in of(RowFailed, engine.handle(UnloadModel("tiny")))] == [1]
