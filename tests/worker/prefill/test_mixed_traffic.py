"""Prompts that come while others are computed and rows decode, by the clock of simulated machines.

Whatever comes, rows that decode keep a fifth of the time, and wait for about one piece of a prompt.
"""

from collections.abc import Callable

import pytest

from mlx_server.engine.messages import Schedule
from tests.worker.simulated import PAIRS, Answer, Simulation, long_prompt_next_to_stream

pytestmark = pytest.mark.tables

LONGEST_GAP, MARGIN = 0.4, 1.1
LONG, SHORT = 20_000, 200
SOME_PAIRS = ("m4:8b", "m4-pro:30b-a3b", "m4-max:gpt-oss-20b", "m3-ultra:gpt-oss-120b")

Scene = Callable[[Simulation], list[Answer]]
"""Asks, and runs until the returned answers have a token."""


def streaming(named: str, streams: int, *, cache_bytes: int = 0) -> Simulation:
    """A simulation of which so many rows have decoded for a while."""
    simulation = Simulation(named, concurrency=32, cache_bytes=cache_bytes)
    simulation.ask(20, 2)
    simulation.run()
    rows = [simulation.ask(300, 1_000_000, f"stream {n}") for n in range(streams)]
    run_until(simulation, lambda: all(len(row.times) > 60 for row in rows))
    simulation.pieces.clear()
    simulation.steps.clear()
    return simulation


def run_until(simulation: Simulation, reached: Callable[[], bool]) -> None:
    while not reached():
        simulation.step()


def answered(simulation: Simulation, answers: list[Answer]) -> list[Answer]:
    run_until(simulation, lambda: all(answer.times for answer in answers))
    return answers


def two_long_prompts(simulation: Simulation) -> list[Answer]:
    return answered(simulation, [simulation.ask(LONG, 8, client) for client in "ab"])


def another_when_one_is_half_done(simulation: Simulation) -> list[Answer]:
    first = simulation.ask(LONG, 8, "a")
    run_until(simulation, lambda: first.computed > LONG / 2)
    return answered(simulation, [first, simulation.ask(LONG, 8, "b")])


def short_prompts_next_to_a_long_one(simulation: Simulation) -> list[Answer]:
    long = simulation.ask(LONG, 8, "a")
    run_until(simulation, lambda: long.computed > 5000)
    short = [simulation.ask(SHORT, 32, client) for client in "ab" * 8]
    return answered(simulation, [long, *short])


def prompts_with_adapters(simulation: Simulation) -> list[Answer]:
    adapters = [None, "x", "y", None]
    prompts = [simulation.ask(3000, 32, f"{n}", adapter) for n, adapter in enumerate(adapters)]
    return answered(simulation, prompts)


def a_long_prompt_that_is_preempted(simulation: Simulation) -> list[Answer]:
    long = simulation.ask(LONG, 8, "a")
    run_until(simulation, lambda: long.computed > LONG / 2)
    simulation.preempt(long)
    short = answered(simulation, [simulation.ask(SHORT, 8, "b")])
    simulation.resume(long)
    return answered(simulation, [*short, long])


def a_row_that_is_preempted(simulation: Simulation) -> list[Answer]:
    """Its prompt and its answer so far are computed again."""
    row = simulation.ask(LONG, 200, "a")
    run_until(simulation, lambda: len(row.times) > 50)
    simulation.preempt(row)
    simulation.step()
    simulation.resume(row)
    run_until(simulation, lambda: len(row.times) > 60)
    return [row]


def prompts_that_begin_alike(simulation: Simulation) -> list[Answer]:
    begin = [9] * 4000
    ends = [[n + 10, *[7] * SHORT] for n in range(16)]
    return answered(simulation, [simulation.ask([*begin, *end], 32, "a") for end in ends])


def prompts_that_are_cancelled(simulation: Simulation) -> list[Answer]:
    """Each when half of it is computed, and another one comes at once."""
    for _ in range(4):
        prompt = simulation.ask(4000, 8, "a")
        run_until(simulation, lambda prompt=prompt: prompt.computed > 2000)  # type: ignore[misc]
        simulation.cancel(prompt)
    return answered(simulation, [simulation.ask(4000, 8, "a")])


SCENES = [
    (two_long_prompts, 8),
    (another_when_one_is_half_done, 1),
    (short_prompts_next_to_a_long_one, 1),
    (prompts_with_adapters, 4),
    (a_long_prompt_that_is_preempted, 2),
    (a_row_that_is_preempted, 2),
    (prompts_that_begin_alike, 2),
    (prompts_that_are_cancelled, 2),
]


@pytest.mark.parametrize("named", SOME_PAIRS)
@pytest.mark.parametrize(("scene", "streams"), SCENES)
def test_rows_that_decode_keep_their_share_and_wait_for_one_piece(
    named: str, scene: Scene, streams: int
) -> None:
    simulation = streaming(named, streams, cache_bytes=1 << 24)
    began, rows = simulation.now, simulation.answers[-streams:]
    scene(simulation)
    # with a long row next to others, a step alone may take longer than the gap
    limit = max(LONGEST_GAP, MARGIN * Schedule().longest_gap + max(simulation.steps))
    assert max(gap for row in rows for gap in row.between(began, simulation.now)) <= limit
    prefilling = sum(simulation.pieces) / (simulation.now - began)
    assert prefilling <= MARGIN * Schedule().prefill_share
    assert sum(simulation.pieces) + sum(simulation.steps) == pytest.approx(simulation.now - began)


LENGTHS = [
    *(33, 50, 64, 100, 150, 200, 250, 700, 1000, 1021, 1200, 1500, 2000, 4000),
    15_013,
]
"""They are computed in one piece or several, and the last piece of each has another size. Shorter
ones take the time of so few steps that a step more or less is too much or too little.

Prompts of 30,000 are in test_budget.py."""


@pytest.mark.parametrize(
    ("named", "prompt"),
    [*((named, prompt) for named in PAIRS for prompt in LENGTHS), ("m4:8b", 60_000)],
)
def test_the_bounds_of_a_long_prompt_hold_for_other_lengths(named: str, prompt: int) -> None:
    found = long_prompt_next_to_stream(named, prompt)
    assert found.first_token <= 1.30 * found.alone
    assert found.speed >= 0.2
    assert found.longest_gap <= LONGEST_GAP


def test_prompts_that_begin_alike_are_computed_once() -> None:
    simulation = streaming("m4-max:gpt-oss-120b", 1, cache_bytes=1 << 24)
    alone = streaming("m4-max:gpt-oss-120b", 1)
    answered(alone, [alone.ask(4000 + SHORT, 8)])
    prompts_that_begin_alike(simulation)
    assert sum(simulation.pieces) < 2.5 * sum(alone.pieces)


def test_a_newcomer_with_many_short_prompts_does_not_wait_for_a_long_one() -> None:
    """Two clients get the same: the short prompts take twice their own time."""
    alone = streaming("m4:8b", 1)
    answered(alone, [alone.ask(SHORT, 32, "b") for _ in range(16)])
    own = [answer.first_token for answer in alone.answers[-16:]]
    simulation = streaming("m4:8b", 1)
    long = simulation.ask(LONG, 8, "a")
    run_until(simulation, lambda: long.computed > 5000)
    short = answered(simulation, [simulation.ask(SHORT, 32, "b") for _ in range(16)])
    assert not long.times
    assert sum(answer.first_token for answer in short) <= 2.2 * sum(own)
