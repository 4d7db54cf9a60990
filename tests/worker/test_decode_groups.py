"""Rows decode in groups of similar lengths where a step reads less that way."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_parts.simulated.roofline import PAIRS, pair, seconds
from bench_parts.simulated.virtual import Simulation
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.worker.costs import CostCurve, StepCosts
from mlx_server.worker.decode_groups import cheapest_groups, padding
from tests.worker.bench import Bench
from tests.worker.kinds import STORED

SHORT, LONG = 300, 30_000


def step_of(named: str, lengths: list[int]) -> tuple[float, list[int]]:
    """Seconds of a step of rows with such prompts, and the groups' sizes."""
    simulation = Simulation(named, concurrency=32)
    rows = [simulation.ask(length, 1_000_000) for length in lengths]
    while not all(row.times for row in rows):
        simulation.step()
    simulation.steps.clear()
    while len(simulation.steps) < 4:
        simulation.step()
    return simulation.steps[-1], sorted(map(len, simulation.batch.decoder.lengths))


@pytest.mark.slow
@pytest.mark.parametrize("named", PAIRS[::2])
def test_short_rows_next_to_a_long_one_step_faster_than_in_one_batch(named: str) -> None:
    lengths = [*[SHORT] * 8, LONG]
    took, groups = step_of(named, lengths)
    machine, model = pair(named)
    assert groups == [1, 8]
    assert took < 0.7 * seconds(machine, model, 1, [LONG] * len(lengths))  # in one batch


@pytest.mark.parametrize("named", PAIRS)
def test_rows_of_similar_lengths_share_a_batch(named: str) -> None:
    """Where they share reads of the weights: M1 and M2 read affine weights for each row."""
    took, groups = step_of(named, [300, 500, 900, 2000])
    machine, model = pair(named)
    assert took <= 1.08 * seconds(machine, model, 1, [2000] * 4)
    assert groups == [4] or (machine.known_chip and machine.known_chip.generation < 15)


@pytest.mark.parametrize(
    ("named", "rows", "padding"),
    [("m2:8b", 3, 0), ("m2:8b", 5, 5), ("m2:8b", 9, 1), ("m2:8b", 10, 0), ("m4:8b", 9, 0)],
)
def test_a_step_is_padded_to_the_next_kernel_where_that_takes_less_time(
    named: str, rows: int, padding: int
) -> None:
    machine, model = pair(named)
    took, groups = step_of(named, [300] * rows)
    assert groups == [rows]
    assert took == pytest.approx(seconds(machine, model, 1, [310] * rows, padding), rel=0.01)
    assert (took < 0.98 * seconds(machine, model, 1, [310] * rows)) is bool(padding)


@pytest.mark.parametrize("path", [kind.name for kind in STORED if kind.quantized], indirect=True)
def test_padded_rows_answer_as_without_padding(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [list(range(n, n + 20)) for n in (1, 30, 90)]
    expected = Bench(path).together(prompts)
    monkeypatch.setattr(CostCurve, "padding", lambda self, rows: 5)
    assert Bench(path).together(prompts) == expected


def steps_cost(monkeypatch: pytest.MonkeyPatch, *, weights: float, token: float) -> None:
    monkeypatch.setattr(StepCosts, "weights", lambda self, rows: weights)
    monkeypatch.setattr(StepCosts, "token", lambda self, caches: token)


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 85, 200])
def test_groups_are_never_padded_by_more_than_there_is_memory_for(
    most: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no padding is worth another group."""
    steps_cost(monkeypatch, weights=1e9, token=0.0)
    bench = Bench(llama, most_padding=most)
    decoder = bench.engine.models.batches["m"].decoder
    sizes = list[list[int]]()
    for length in (5, 90, 6, 90, 40, 7):
        bench.begin(list(range(length)), 40)
        for _ in range(8):
            bench.step()
            assert sum(map(padding, decoder.lengths)) <= most
            sizes.append([*map(len, decoder.lengths)])
    assert (max(map(max, sizes)) > 2) is (most > 0), "rows share a group where that is allowed"


@pytest.mark.slow
def test_rows_that_change_groups_answer_as_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come and go, so that groups are made, split and joined: any padding is worth one."""
    steps_cost(monkeypatch, weights=1.0, token=1.0)
    dice, cold, grouped = random.Random(1), Bench(path), Bench(path)
    decoder = grouped.engine.models.batches["m"].decoder
    prompts = [[dice.randrange(250) for _ in range(length)] for length in (5, 90, 6, 90, 40, 7)]
    most, answers = 0, dict[int, list[int]]()
    asks = [(prompt, 12 + 5 * number) for number, prompt in enumerate(prompts)]
    for ask in asks:
        grouped.begin(*ask)
        for _ in range(4):
            gather(answers, grouped.step())
            most = max(most, len(decoder.lengths))
    gather(answers, grouped.finish())
    assert most > 1
    assert list(dict(sorted(answers.items())).values()) == [cold.answer(*ask) for ask in asks]


def gather(answers: dict[int, list[int]], more: dict[int, list[int]]) -> None:
    for row, tokens in more.items():
        answers.setdefault(row, []).extend(tokens)


def every_grouping(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    first, *others = rows
    for groups in every_grouping(others):
        yield [[first], *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], [first, *group], *groups[at + 1 :]]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    weights=st.integers(0, 60),
    experts=st.integers(0, 60),
)
def test_no_groups_read_less(lengths: list[int], weights: int, experts: int) -> None:
    def read(rows: int, longest: int) -> float:
        return weights + experts * (1 - 0.5**rows) + rows * longest

    def all_read(groups: list[list[int]]) -> float:
        return sum(read(len(group), max(lengths[row] for row in group)) for group in groups)

    least, found = cheapest_groups(lengths, read)
    rows = list(range(len(lengths)))
    assert sorted(row for group in found for row in group) == rows
    assert least == pytest.approx(all_read(found))
    assert least <= min(map(all_read, every_grouping(rows))) + 1e-9
