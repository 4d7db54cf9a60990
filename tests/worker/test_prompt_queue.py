"""Prompts that wait, and those that are computed together in pieces."""

from typing import Any

import pytest

from mlx_server.worker.prefill_groups import SHARED
from tests.worker.batch_runs import (
    PIECE,
    Ask,
    Run,
    Steady,
    a_prompt,
    alone,
    computed,
    ids,
    together,
)


@pytest.mark.parametrize("cancelled", range(3))
def test_rows_of_one_piece_are_cancelled_one_by_one(tiny_model: Any, cancelled: int) -> None:
    """A piece that was cut short, as it is when there is less room than when it was packed."""
    asks = [Ask(a_prompt(length, seed=4), 6) for length in (9, 30, 20)]
    run = Run(tiny_model)
    for number, ask in enumerate(asks):
        run.join(number, ask)
    begin = run.batch._begin
    run.batch._begin = (  # type: ignore[method-assign]
        lambda following, tokens, done: begin(following, PIECE, done)
    )
    run.batch._budget = Steady(36)
    run.step()
    assert run.stages == (0, 3, 0)
    assert run.batch._group
    assert [len(rest) for rest in run.batch._group.rest] == [1, 8, 18]
    run.batch.cancel(cancelled)
    run.finish()
    expected = [[] if n == cancelled else ids(alone(tiny_model, asks[n])) for n in range(3)]
    assert [ids(run.answers[n]) for n in range(3)] == expected
    run.assert_nothing_is_left()


def test_equal_prompts_are_prefilled_once(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Ask(a_prompt(60))
    expected = ids(alone(tiny_model, ask))
    pieces = computed(monkeypatch)
    run = Run(tiny_model, piece=1000, cache_bytes=1 << 30)
    for number in range(5):
        run.join(number, ask)
    run.finish()
    assert run.cached == {0: 0, 1: 59, 2: 59, 3: 59, 4: 59}
    assert pieces == [[59]]
    assert [ids(answer) for answer in run.answers.values()] == [expected] * 5


def test_prompts_that_begin_alike_are_computed_from_where_they_part(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    beginning = a_prompt(SHARED + 8)
    asks = [Ask([*beginning, *a_prompt(length, seed=9)]) for length in (10, 20, 30)]
    expected = together(tiny_model, asks)
    pieces = computed(monkeypatch)
    run = Run(tiny_model, piece=1000, cache_bytes=1 << 30)
    for number, ask in enumerate([*asks, Ask(a_prompt(55, seed=10))]):
        run.join(number, ask)
    run.finish()
    assert run.cached == {0: 0, 1: SHARED + 8, 2: SHARED + 8, 3: 0}
    assert pieces == [[SHARED + 17, 54], [19, 29]]
    assert [ids(run.answers[n]) for n in range(3)] == [ids(answer) for answer in expected]


def test_a_piece_of_known_and_unknown_prompts_and_such_without_a_rest(tiny_model: Any) -> None:
    """In one piece: half known, unknown, known but for the last token, of a single token."""
    first, second = a_prompt(40, seed=1), a_prompt(50, seed=2)
    run = Run(tiny_model, piece=1000, cache_bytes=1 << 30)
    for number, prompt in enumerate([first, second]):
        run.join(number, Ask(prompt, 30))
    run.until_decoding()
    asks = [Ask([*first[:30], *a_prompt(12)]), Ask(a_prompt(33)), Ask(second), Ask(a_prompt(1))]
    for number, ask in enumerate(asks, 2):
        run.join(number, ask)
    run.step()
    assert run.stages == (0, 0, 6)
    run.finish()
    assert [run.cached[n] for n in range(2, 6)] == [30, 0, 49, 0]
    answers = [ids(run.answers[n]) for n in range(2, 6)]
    assert answers == [ids(alone(tiny_model, ask)) for ask in asks]


def test_a_prompt_in_pieces_is_computed_piece_by_piece(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = computed(monkeypatch)
    alone(tiny_model, Ask(a_prompt(2 * PIECE + 101)))
    assert pieces == [[PIECE], [PIECE], [100]]


def test_the_short_end_of_a_prompt_goes_with_the_piece_before(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = computed(monkeypatch)
    alone(tiny_model, Ask(a_prompt(2 * PIECE + 17)))
    assert pieces == [[PIECE], [PIECE + 16]]
