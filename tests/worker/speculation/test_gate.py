"""How many drafted tokens a pass computes."""

from collections.abc import Sequence
from itertools import islice

import pytest
from bench_parts.speculation.corpora import copies, prose, quotes
from bench_parts.speculation.simulated import Drafters, Mac, decode, speed_up
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.worker.costs import FLAT, CostCurve
from mlx_server.worker.speculation.draft import Draft
from mlx_server.worker.speculation.gate import LAUNCH, MOST_DRAFTED, SLOWEST, Gate
from mlx_server.worker.speculation.lookup import TokenLookup
from mlx_server.worker.speculation.row_drafter import RowDrafter

LINEAR = CostCurve({1: 1.0, 2: 2.0}, {1: 1.0})
STEPPED = CostCurve({1: 1.0, 2: 1.0, 5: 1.75, 10: 4.5, 32: 4.5, 33: 9.0}, {1: 1.0})


def draft(*chances: float, pace: float = 1.0) -> Draft:
    return Draft([7] * len(chances), "lookup", 2, chances=[*chances], pace=pace)


SURE = draft(*[0.99] * MOST_DRAFTED)


def test_a_sure_draft_reaches_the_end_of_a_kernels_step_and_not_past_it() -> None:
    """Past the step at 10 positions the next 22 are free."""
    assert Gate(STEPPED).widths([SURE]) == [31]
    two = Gate(STEPPED).widths([SURE, SURE])
    assert sum(two) + 2 == 32


def test_a_row_without_a_draft_is_hardly_slower_next_to_one_that_copies() -> None:
    assert Gate(STEPPED).widths([None, SURE]) == [0, 0]
    flat_to_four = CostCurve({1: 1.0, 4: 1.0, 5: 3.0}, {1: 1.0})
    assert sum(Gate(flat_to_four).widths([None, SURE])) == 2


def test_a_row_that_copies_waits_while_it_looks_for_its_place() -> None:
    lost = draft(0.3, pace=3.0)
    assert sum(Gate(STEPPED).widths([lost, *[SURE] * 7])) > 0
    assert sum(Gate(STEPPED).widths([draft(0.3), *[SURE] * 7])) == 0


def test_a_gain_that_is_small_is_kept_and_not_begun() -> None:
    gate = Gate(FLAT)
    small = draft(1.065 * (1 + LAUNCH) - 1)
    assert gate.widths([small]) == [0]
    assert gate.widths([SURE]) == [MOST_DRAFTED]
    assert gate.widths([small]) == [1]
    assert gate.widths([None]) == [0]
    assert gate.widths([small]) == [0]


def test_keys_and_values_are_read_once_for_all_positions() -> None:
    unsure = draft(0.4)
    steep = CostCurve({1: 1.0, 2: 1.5}, {1: 1.0})
    assert Gate(steep).widths([unsure]) == [0]
    assert Gate(steep).widths([unsure], extra=4.0) == [1]


def test_a_measured_curve_takes_the_place_of_the_first_one() -> None:
    gate = Gate(LINEAR)
    assert gate.most(1) == 0
    gate.use(FLAT)
    assert gate.most(1) == MOST_DRAFTED
    assert gate.widths([SURE]) == [MOST_DRAFTED]


curves = st.lists(st.floats(0.01, 3.0), min_size=1, max_size=40).map(
    lambda rises: CostCurve({n: 1 + sum(rises[:n]) for n in range(1, len(rises) + 1)}, {1: 1.0})
)
falling = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=MOST_DRAFTED).map(
    lambda chances: draft(*sorted(chances, reverse=True))
)


@given(curves, st.lists(st.none() | falling, min_size=1, max_size=9))
def test_no_row_is_slowed_by_what_others_draft(
    curve: CostCurve, drafts: list[Draft | None]
) -> None:
    widths = Gate(curve).widths(drafts)
    rows, total = len(drafts), sum(widths)
    lengths = [len(each.tokens) if each else 0 for each in drafts]
    assert all(0 <= width <= length for width, length in zip(widths, lengths, strict=True))
    if total:
        cost = curve.step(rows + total) * (1 + LAUNCH) / curve.step(rows)
        pairs = zip(drafts, widths, strict=True)
        gained = [1 + sum(each.chances[:width]) if each else 1.0 for each, width in pairs]
        assert min(gained) / cost >= SLOWEST - 1e-9
        assert sum(gained) / rows / cost > 1


def sent(gate: Gate, drafter: RowDrafter, answer: Sequence[int]) -> list[int]:
    """The widths of passes that compute no draft at all: all that is learnt is compared in vain."""
    widths = []
    for token in answer:
        widths += gate.widths([drafter.draft(MOST_DRAFTED)])
        drafter.extend([token])
    return widths


def test_it_learns_from_drafts_that_no_pass_computed() -> None:
    gate = Gate(STEPPED)
    text = [*range(100)]
    widths = sent(gate, RowDrafter([TokenLookup(text)], gate), text[:90])
    assert widths[-1] == 31
    wrong = [token for n in range(60) for token in (n % 90, n % 90 + 1, 999 - n)]
    widths = sent(gate, RowDrafter([TokenLookup(text)], gate), wrong)
    assert sum(widths[-60:]) <= 12


@pytest.mark.parametrize("curve", ["flat", "m4", "m1"])
@pytest.mark.parametrize("rows", [1, 4])
def test_prose_is_not_slowed(drafters: Drafters, curve: str, rows: int) -> None:
    mac, samples = Mac("m4-pro", "8b", curve), prose()[:6]
    gate = Gate(mac.costs())
    plain = decode(samples, drafters, mac, rows, None)
    mean, least = speed_up(plain, decode(samples, drafters, mac, rows, gate))
    assert mean >= 1 - 1e-9
    assert least >= 0.98


@pytest.mark.parametrize(("rows", "least"), [(1, 3.0), (4, 1.8), (8, 2.0)])
def test_copies_are_faster(drafters: Drafters, rows: int, least: float) -> None:
    mac, samples = Mac("m4-pro", "8b"), copies(count=8)
    gate = Gate(mac.costs())
    plain = decode(samples, drafters, mac, rows, None)
    assert speed_up(plain, decode(samples, drafters, mac, rows, gate))[0] >= least


@pytest.mark.parametrize("model", ["8b", "30b-a3b"])
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_rows_next_to_one_that_copies_are_hardly_slower(
    drafters: Drafters, model: str, rows: int
) -> None:
    mac, plain_ones = Mac("m4-pro", model), iter(prose() * 3)
    samples = [
        sample for copy in copies(count=4) for sample in (copy, *islice(plain_ones, rows - 1))
    ]
    plain = decode(samples, drafters, mac, rows, None)
    drafted = decode(samples, drafters, mac, rows, Gate(mac.costs()))
    assert speed_up(plain, drafted)[1] >= SLOWEST


def test_quotes_take_fewer_passes(drafters: Drafters) -> None:
    mac = Mac("m4-pro", "8b")
    quoted = decode(quotes() * 2, drafters, mac, 1, Gate(mac.costs()))
    assert quoted.tokens_per_pass >= 1.5
