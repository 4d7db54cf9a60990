"""Short prompts that wait at the same time share forward passes, on a simulated machine."""

from pathlib import Path
from typing import Any

import pytest
from bench_parts.simulated.bounds import least_crowd, tile_gap, waited
from bench_parts.simulated.roofline import PAIRS
from bench_parts.simulated.schedules import short_prompts
from bench_parts.simulated.virtual import Answer, Simulation, together_by_mlx_lm

from mlx_server.worker.prefill_groups import SHARED
from mlx_server.worker.prompt_store import RowPrompts
from mlx_server.worker.row import Row
from tests.tables import cases
from tests.worker.batch_runs import Ask, Run, a_prompt, alone, computed, ids, together
from tests.worker.bench import Bench

PAIR = "m4-max:gpt-oss-120b"

OF_LEAST = 1.2
"""Where no schedule reaches a goal, ours keeps to so many times the least that one can."""

LONGEST_GAP, LONGER_GAP, OF_TILE = 0.4, 0.45, 1.1


def simulation_after(prompts: list[int], named: str = PAIR) -> Simulation:
    """A simulation in which these prompts came one after the other."""
    simulation = Simulation(named)
    for prompt in prompts:
        simulation.ask(prompt, 2)
        simulation.run()
    simulation.pieces.clear()
    return simulation


def passes(simulation: Simulation, answers: list[Answer]) -> int:
    """The passes of prefill until all of these have a token."""
    for answer in answers:
        simulation.run(until=answer)
    return len(simulation.pieces)


def test_a_long_prompt_does_not_part_the_short_ones_around_it_and_is_next() -> None:
    simulation = simulation_after([4000])
    first = simulation.ask(40, 8, "a")
    long = simulation.ask(3000, 8, "b")
    others = [simulation.ask(40, 8, name) for name in "cde"]
    assert passes(simulation, [first, *others]) == 1
    later = simulation.ask(40, 8, "c")
    while not long.computed:
        simulation.step()
    assert not later.computed


@pytest.mark.parametrize("named", PAIRS)
def test_sixteen_short_prompts_next_to_a_stream(named: str) -> None:
    ours = short_prompts(named)
    gap = ours.longest_gap
    at_once = together_by_mlx_lm(named, 32, prompt=200, count=16)
    if ours.first_token > 0.75 * at_once.first_token or ours.done > 1.25 * at_once.done:
        assert waited(ours) <= OF_LEAST * waited(least_crowd(named, 32, 200, 16, gap, streams=1))
    # two prompts may just fit into a piece, and another 48th for their last tokens
    if gap > 1.05 * LONGEST_GAP:  # first tokens would be later with it, whatever the schedule
        assert gap <= max(LONGER_GAP, OF_TILE * tile_gap(named, 17, 200))
        least = least_crowd(named, 32, 200, 16, LONGEST_GAP, streams=1)
        assert waited(ours) < waited(least)


@pytest.mark.parametrize(("ahead", "steps", "of_one_pass"), [(True, 2, 0.8), (False, 0, 0.7)])
def test_prompts_are_computed_apart_where_a_pass_of_all_is_no_faster(
    ahead: bool, steps: int, of_one_pass: float
) -> None:
    simulation = simulation_after([2000, 64, 200, 100], "m4-max:gpt-oss-20b")
    simulation.batch.is_launched_ahead = ahead
    simulation.steps.clear()
    answers = [simulation.ask(64, 8, client) for client in "abcd"]
    assert passes(simulation, answers) == 2
    assert len(simulation.steps) == steps  # which send the first tokens of what is launched ahead
    all_at_once = together_by_mlx_lm("m4-max:gpt-oss-20b", 8, prompt=64, count=4)
    mean = sum(answer.first_token for answer in answers) / len(answers)
    assert mean <= of_one_pass * all_at_once.first_token


@cases
def test_more_than_half_of_a_crowd_is_computed_first_where_no_curve_is_known(
    lengths: list[int], groups: list[int], tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = computed(monkeypatch)
    prompts = [a_prompt(length, seed=number) for number, length in enumerate(lengths)]
    together(tiny_model, [Ask(prompt) for prompt in prompts])
    assert [len(piece) for piece in pieces] == groups


def test_a_stream_goes_on_next_to_prompts_of_which_only_the_last_token_is_left() -> None:
    """Also where their first tokens need no step."""
    simulation = simulation_after([2000, 64, 200], "m1:8b")
    simulation.batch.is_launched_ahead = False
    stream = simulation.ask(300, 10_000)
    simulation.run(until=stream)
    begun = simulation.now
    for _ in range(50):
        simulation.ask([3], 1)
        simulation.step()
    assert max(stream.between(begun, simulation.now)) < 2 * LONGEST_GAP


@pytest.mark.parametrize(("cached", "expected"), [(1000, 1), (5000, 2)])
def test_a_short_prompt_is_not_padded_to_one_that_is_mostly_cached(
    cached: int, expected: int
) -> None:
    simulation = Simulation("m4-pro:30b-a3b", cache_bytes=1 << 26)
    prompt = [11, *[7] * cached]
    simulation.ask(prompt, 2)
    simulation.run()
    simulation.pieces.clear()
    answers = [simulation.ask([*prompt, *[9] * 30], 8, "a"), simulation.ask(40, 8, "b")]
    assert passes(simulation, answers) == expected


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


def test_prompts_that_wait_are_looked_up_again_only_for_more(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many may wait with one system prompt, and each lookup reads all tokens."""
    looked, known = list[int](), RowPrompts.known

    def counted(prompts: RowPrompts, row: Row, tokens: list[int]) -> int:
        looked.append(row.number)
        return known(prompts, row, tokens)

    monkeypatch.setattr(RowPrompts, "known", counted)
    run, beginning = Run(tiny_model, piece=40, cache_bytes=1 << 30), a_prompt(SHARED + 8)
    for number in range(10):
        run.join(number, Ask([*beginning, *a_prompt(50, seed=number)]))
    run.finish()
    assert list(run.cached.values()) == [0, *[SHARED + 8] * 9]
    assert len(looked) <= 3 * 10, "as each comes, after the first, and before it is stored"


def test_prompts_that_share_several_pieces_answer_as_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one of them is cancelled and a shorter one comes meanwhile."""
    model = Bench(path).batch.model
    asks = [Ask(a_prompt(length)) for length in (70, 33, 61, 64, 5)]
    expected = [ids(alone(model, ask)) for ask in asks]
    pieces, run = computed(monkeypatch), Run(model, piece=48)
    monkeypatch.setattr(run.budget, "together", lambda _, left, piece: len(left))
    for number, ask in enumerate(asks[:-1]):
        run.join(number, ask)
    run.step()
    run.batch.cancel(3)
    run.join(4, asks[4])
    run.finish()
    assert pieces[0] == [12, 12, 12, 12]
    assert [ids(run.answers[n]) for n in (0, 1, 2, 4)] == [expected[n] for n in (0, 1, 2, 4)]
