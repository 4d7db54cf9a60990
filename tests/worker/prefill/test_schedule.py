"""How much of a prompt is computed between two tokens, on machines that are a formula."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import pytest
from bench_parts.simulated.bounds import least_crowd, least_gap
from bench_parts.simulated.roofline import PAIRS
from bench_parts.simulated.virtual import (
    Answer,
    Simulation,
    alone_by_mlx_lm,
    crowd,
    long_prompt_next_to_stream,
    together_by_mlx_lm,
)

from mlx_server.worker.prefill.schedule import (
    FIRST,
    IDLE_SECONDS,
    LEAST,
    MOST,
    PrefillBudget,
    PrefillCost,
    PrefillPiece,
    Schedule,
)

SCHEDULE = Schedule()


@dataclass
class Machine:
    step: float
    piece: float
    """Seconds that any piece takes, however short."""
    token: float
    """Seconds for each of its tokens."""
    attention: float = 0.0
    """Seconds for each token and each token before it."""
    background: bool = False
    """Whether the end of a step is waited for in the next call."""

    def seconds(self, piece: PrefillPiece) -> float:
        return self.piece + piece.tokens * (
            self.token + self.attention * (piece.context + piece.length / 2)
        )


GPU = Machine(step=0.020, piece=0.010, token=0.0007)
EXPERTS = Machine(step=0.020, piece=0.110, token=0.0007, attention=3e-8)
CPU = Machine(step=0.030, piece=0.022, token=0.0055)
ASYNC = Machine(step=0.020, piece=0.010, token=0.0007, background=True)
MACHINES = [GPU, EXPERTS, CPU, ASYNC]


@dataclass
class Run:
    """What a budget makes of a machine that always has prompts to compute."""

    gaps: list[float]
    pieces: list[PrefillPiece]
    prefilling: float = 0.0
    decoding: float = 0.0


def run(machine: Machine, *, decoding: int = 4, waiting: int = 1, pieces: int = 100) -> Run:
    budget, found, gap, pending = PrefillBudget(SCHEDULE), Run([], []), 0.0, 0.0
    context = 0
    for _ in range(20_000):
        tokens = budget.piece(decoding, waiting, 1, context)
        if tokens:
            piece = PrefillPiece(1, tokens, context)
            took = machine.seconds(piece)
            budget.prefilled(piece, decoding, took + pending)
            found.prefilling += took
            found.pieces.append(piece)
            gap, pending, context = gap + took + pending, 0.0, context + tokens
        else:
            took = machine.step
            if machine.background:
                took, pending = pending, machine.step
            budget.stepped(decoding, took)
            found.decoding += machine.step
            found.gaps.append(gap + took)
            gap = 0.0
        if len(found.pieces) == pieces:
            return found
    pytest.fail("no more pieces came")


@pytest.mark.parametrize("machine", MACHINES)
def test_streams_wait_no_longer_than_the_gap_and_keep_their_share(machine: Machine) -> None:
    found = run(machine)
    assert max(found.gaps[20:]) <= SCHEDULE.longest_gap * 1.15
    share = found.prefilling / (found.prefilling + found.decoding)
    assert SCHEDULE.prefill_share - 0.05 <= share <= SCHEDULE.prefill_share


def test_a_piece_that_reads_all_of_a_model_is_made_worth_it() -> None:
    """Though it takes longer than the gap."""
    found = run(Machine(step=0.05, piece=0.5, token=0.002))
    assert sum(piece.tokens for piece in found.pieces[20:]) / 80 > 100


def test_steps_of_each_size_are_known_by_their_own_time() -> None:
    """A CPU's steps take as long as they have rows, and its flat curve does not say so."""
    budget = PrefillBudget(SCHEDULE)
    prefilling, decoding = Counter[int](), Counter[int]()
    for rows in [1, 16] * 200:
        while not (tokens := budget.piece(rows, 1, 1, 0)):
            budget.stepped(rows, 0.002 * rows)
            decoding[rows] += 2 * rows
        piece = PrefillPiece(1, tokens, 0)
        budget.prefilled(piece, rows, CPU.seconds(piece))
        prefilling[rows] += round(1000 * CPU.seconds(piece))
    for rows, took in prefilling.items():
        assert 0.75 <= took / (took + decoding[rows]) <= 0.82, f"with {rows} rows"


def test_long_prompts_share_no_piece_where_they_are_computed_no_faster_together() -> None:
    """On a CPU, which has no curve; short ones take what a piece takes at least."""
    budget, machine = PrefillBudget(SCHEDULE), Machine(step=0.002, piece=0.001, token=4e-5)
    for rows, length in [(1, 512), (2, 512), (1, 64), (4, 64), (1, 512)] * 4:
        piece = PrefillPiece(rows, length, 0)
        budget.prefilled(piece, 0, machine.seconds(piece))
        budget.stepped(rows, machine.step)
        budget.stepped(rows, machine.step)
    assert budget.together(0, [512] * 4, MOST) == 1
    assert budget.together(0, [64] * 4, MOST) is None


@pytest.mark.parametrize("machine", [GPU, EXPERTS, CPU])
def test_with_nobody_decoding_a_piece_takes_half_a_second(machine: Machine) -> None:
    found = run(machine, decoding=0)
    seconds = [machine.seconds(piece) for piece in found.pieces]
    assert max(seconds) <= IDLE_SECONDS * 1.1
    assert min(seconds[15:]) >= IDLE_SECONDS * 0.9


def test_a_model_whose_neighbours_stream_computes_shorter_pieces() -> None:
    budget = PrefillBudget(SCHEDULE)
    for _ in range(10):
        piece = PrefillPiece(1, budget.piece(0, 1, 1, 0, shared=True), 0)
        budget.prefilled(piece, 0, GPU.seconds(piece))
    assert GPU.seconds(piece) == pytest.approx(SCHEDULE.longest_gap, rel=0.1)


def test_the_rest_of_a_lower_tiers_prompt_takes_no_longer_than_its_pieces() -> None:
    budget, took = PrefillBudget(SCHEDULE).of_others(0.1), 0.0
    for left in (*[10_000] * 40, 380):
        while not (tokens := budget.piece(1, 1, 1, 0, left=left)):
            budget.stepped(1, GPU.step)
        took = GPU.seconds(piece := PrefillPiece(1, tokens, 0))
        budget.prefilled(piece, 1, took)
    assert took <= 0.1 * GPU.seconds(PrefillPiece(1, MOST, 0)) * 1.15


def test_sizes_keep_to_their_limits_on_absurd_machines() -> None:
    for seconds in (1e-12, 1e9):
        budget = PrefillBudget(SCHEDULE)
        for _ in range(50):
            budget.stepped(4, 0.01)
            budget.prefilled(PrefillPiece(1, 64, 0), 4, seconds)
        assert LEAST <= budget.piece(0, 1, 1, 0) <= MOST
        assert budget.piece(4, 1, 1, 0) in (0, *range(LEAST, MOST + 1))


COSTS: list[tuple[Callable[[PrefillPiece], float], float]] = [
    (lambda piece: 0.1 + 0.0007 * piece.tokens, 0.02),
    (lambda piece: 0.0007 * piece.tokens + 5e-8 * piece.tokens * piece.context, 0.05),
    (lambda piece: max(0.1, 0.0007 * piece.tokens), 0.1),
    (lambda piece: 0.11 * (1 - 0.97**piece.tokens) + 0.0005 * piece.tokens, 0.1),
]


@pytest.mark.parametrize(("cost", "error"), COSTS)
def test_what_a_piece_costs_is_learned_at_any_context(
    cost: Callable[[PrefillPiece], float], error: float
) -> None:
    learned, context = PrefillCost(), 0
    assert learned.tokens(0.3, 1, 0) == FIRST
    for _ in range(30):
        piece = PrefillPiece(1, max(1, learned.tokens(0.3, 1, context)), context)
        learned.learn(piece, cost(piece))
        context += piece.length
    for beyond in (0, context, 2 * context):
        piece = PrefillPiece(1, learned.tokens(0.3, 1, beyond), beyond)
        assert cost(piece) <= 0.3 * (1 + error)
    piece = PrefillPiece(1, learned.tokens(0.3, 1, context), context)
    assert cost(piece) >= 0.3 * (1 - error)


def test_a_machine_that_gets_slower_is_followed_at_once() -> None:
    learned = PrefillCost()
    for _ in range(24):
        learned.learn(PrefillPiece(1, 300, 0), 0.3)
    learned.learn(PrefillPiece(1, 300, 0), 0.9)
    assert learned.tokens(0.3, 1, 0) <= 120


SLOWER, LONGEST_GAP, OF_LEAST, GAP_OF_LEAST = 1.30, 0.4, 1.1, 1.25
"""What a long prompt takes next to a stream, and that stream's longest gap. Where no schedule keeps
to a goal, ours keeps to so many times the least that one can reach."""

LONG = [(pair, 15_000) for pair in PAIRS[::2]] + [
    (pair, 30_000) for pair in ("m1:8b", "m4-pro:30b-a3b", "m4-max:gpt-oss-120b")
]


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "prompt"), LONG)
def test_a_long_prompt_next_to_a_stream(pair: str, prompt: int) -> None:
    """On simulated machines; scripts/bench_parts/README.md has a table for 30,000 tokens."""
    found = long_prompt_next_to_stream(pair, prompt)
    assert found.alone <= 1.02 * alone_by_mlx_lm(pair, prompt)
    assert found.first_token <= SLOWER * found.alone
    assert found.speed >= 0.2
    least = least_gap(pair, prompt, found.first_token / found.alone)
    assert found.longest_gap <= max(LONGEST_GAP, GAP_OF_LEAST * least)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "done"), [(32, 1.10), (256, 1.22)])
@pytest.mark.parametrize("pair", PAIRS)
def test_prompts_that_come_at_once(pair: str, tokens: int, done: float) -> None:
    """Where each row of a step reads the weights, or prompts are computed much faster than answers,
    no schedule reaches the goals without longer gaps."""
    ours, theirs = crowd(pair, tokens), together_by_mlx_lm(pair, tokens)
    least = least_crowd(pair, tokens, 2000, 8, ours.longest_gap)
    goal = 0.72 * theirs.first_token
    assert ours.first_token <= max(goal, OF_LEAST * least.first_token)
    assert ours.done <= max(done * theirs.done, OF_LEAST * least.done)


MARGIN = 1.1
LONGER_GAPS = {"m4-pro:30b-a3b": 0.45}
"""A last piece of fewer than 64 tokens reads eight experts for each of them."""
DEEP, SHORT = 20_000, 200
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
    return answered(simulation, [simulation.ask(DEEP, 8, client) for client in "ab"])


def another_when_one_is_half_done(simulation: Simulation) -> list[Answer]:
    first = simulation.ask(DEEP, 8, "a")
    run_until(simulation, lambda: first.computed > DEEP / 2)
    return answered(simulation, [first, simulation.ask(DEEP, 8, "b")])


def short_prompts_next_to_a_long_one(simulation: Simulation) -> list[Answer]:
    long = simulation.ask(DEEP, 8, "a")
    run_until(simulation, lambda: long.computed > 5000)
    short = [simulation.ask(SHORT, 32, client) for client in "ab" * 8]
    return answered(simulation, [long, *short])


def prompts_with_adapters(simulation: Simulation) -> list[Answer]:
    adapters = [None, "x", "y", None]
    prompts = [simulation.ask(3000, 32, f"{n}", adapter) for n, adapter in enumerate(adapters)]
    return answered(simulation, prompts)


def a_long_prompt_that_is_preempted(simulation: Simulation) -> list[Answer]:
    long = simulation.ask(DEEP, 8, "a")
    run_until(simulation, lambda: long.computed > DEEP / 2)
    simulation.preempt(long)
    short = answered(simulation, [simulation.ask(SHORT, 8, "b")])
    simulation.resume(long)
    return answered(simulation, [*short, long])


def a_row_that_is_preempted(simulation: Simulation) -> list[Answer]:
    """Its prompt and its answer so far are computed again."""
    row = simulation.ask(DEEP, 200, "a")
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "scene", "streams"),
    [(named, *scene) for named, scene in zip(cycle(SOME_PAIRS), SCENES, strict=False)],
)
def test_rows_that_decode_keep_their_share_and_wait_for_one_piece(
    named: str, scene: Scene, streams: int
) -> None:
    simulation = streaming(named, streams, cache_bytes=1 << 24)
    began, rows = simulation.now, simulation.answers[-streams:]
    scene(simulation)
    # with a long row next to others, a step alone may take longer than the gap
    limit = max(
        LONGER_GAPS.get(named, LONGEST_GAP), MARGIN * Schedule().longest_gap + max(simulation.steps)
    )
    assert max(gap for row in rows for gap in row.between(began, simulation.now)) <= limit
    prefilling = sum(simulation.pieces) / (simulation.now - began)
    assert prefilling <= MARGIN * Schedule().prefill_share
    assert sum(simulation.pieces) + sum(simulation.steps) == pytest.approx(simulation.now - began)


LENGTHS = [33, 64, 250, 1021, 4000, 15_013]
"""They are computed in one piece or several, and the last piece of each has another size. Shorter
ones take the time of so few steps that a step more or less is too much or too little.

Prompts of 30,000 come in tests above."""


@pytest.mark.slow
@pytest.mark.parametrize(("named", "prompt"), [*zip(cycle(SOME_PAIRS), LENGTHS)])
def test_the_bounds_of_a_long_prompt_hold_for_other_lengths(named: str, prompt: int) -> None:
    found = long_prompt_next_to_stream(named, prompt)
    assert found.first_token <= SLOWER * found.alone
    assert found.speed >= 0.2
    assert found.longest_gap <= LONGEST_GAP


@pytest.mark.slow
def test_a_newcomer_with_many_short_prompts_does_not_wait_for_a_long_one() -> None:
    """Two clients get the same: the short prompts take twice their own time."""
    alone = streaming("m4:8b", 1)
    answered(alone, [alone.ask(SHORT, 32, "b") for _ in range(16)])
    own = [answer.first_token for answer in alone.answers[-16:]]
    simulation = streaming("m4:8b", 1)
    long = simulation.ask(DEEP, 8, "a")
    run_until(simulation, lambda: long.computed > 5000)
    short = answered(simulation, [simulation.ask(SHORT, 32, "b") for _ in range(16)])
    assert not long.times
    assert sum(answer.first_token for answer in short) <= 2.2 * sum(own)
