"""A batch has places for so many rows, and a client that has none gets one."""

import random
from typing import Any

from tests.worker.batch_runs import MIXED, PIECE, Ask, Run, a_prompt, alone, ids


def test_a_row_that_decodes_gives_its_place_and_gets_it_back(tiny_model: Any) -> None:
    """Its client has several, and the newcomer none. Nobody's answer changes."""
    asks = [Ask(a_prompt(9, seed=n), 30, sampling=MIXED[n], client="greedy") for n in range(4)]
    newcomer = Ask(a_prompt(9, seed=9), 5, sampling=MIXED[4], client="newcomer")
    run = Run(tiny_model, concurrency=3)
    for number, ask in enumerate(asks):
        run.join(number, ask)
    while run.stages[2] < 3:
        run.step()
    run.join(4, newcomer)
    while not run.answers[4]:
        run.step()
        assert sum(run.stages[1:]) <= 3
    assert len(run.batch._kept_decode) == 1
    assert not run.answers[3]
    run.finish()
    expected = [ids(alone(tiny_model, ask)) for ask in [*asks, newcomer]]
    assert [ids(answer) for answer in run.answers.values()] == expected
    run.assert_nothing_is_left()


def test_no_more_rows_are_taken_than_may_run_together(tiny_model: Any) -> None:
    """Rows in prefill count too: each holds a cache."""
    dice = random.Random(5)
    run = Run(tiny_model, concurrency=3)
    for number in range(12):
        run.join(number, Ask(a_prompt(dice.randint(1, 2 * PIECE)), dice.randint(1, 20)))
    most = 0
    while run.batch:
        run.step()
        waiting, prefill, decode = run.stages
        assert waiting + prefill == run.batch.waiting
        most = max(most, prefill + decode)
    assert most == 3
