"""What messages count, and how much of a Mac's memory is wired."""

from typing import Any

import pytest

from mlx_server.engine.messages import STEP, Generate, KvCost
from mlx_server.engine.wired_memory import next_limit, wiring
from mlx_server.requests import SamplingParams
from tests.tables import cases


def row(**more: Any) -> Generate:
    return Generate(1, "m", [5, 6], 10, [2], SamplingParams(), **more)


@pytest.mark.parametrize(
    ("overflow", "tokens", "left", "overflow_left"),
    [(4, 10, 10, 4), (4, 99, 10, 4), (4, 8, 8, 2), (4, 6, 6, 0), (4, 1, 1, 0), (0, 3, 3, 0)],
)
def test_a_lower_limit_takes_from_the_overflow_tokens_first(
    overflow: int, tokens: int, left: int, overflow_left: int
) -> None:
    made = row(overflow_tokens=overflow)
    made.end_within(tokens)
    assert (made.max_tokens, made.overflow_tokens) == (left, overflow_left)


MIXED = KvCost(per_token=10, windowed_per_token=4, window=1000, fixed=7)


def test_tokens_are_counted_in_steps_and_a_window_up_to_its_size() -> None:
    assert MIXED.for_tokens(1) == 14 * STEP + 7
    slots = 5000 + STEP - 1
    assert MIXED.for_tokens(5000) == 10 * slots + 4 * 1000 + 7


@pytest.mark.parametrize("nbytes", [0, 4000, 20_000, 90_000])
def test_what_fits_is_the_most_that_costs_no_more(nbytes: int) -> None:
    found = MIXED.tokens_in(nbytes, 9000)
    assert found == 0 or MIXED.for_tokens(found) <= nbytes
    assert MIXED.for_tokens(found + 1) > nbytes


GB = 10**9


@cases
def test_what_is_wired(weights: int, working_set: int, limit: int) -> None:
    assert wiring(weights * GB, working_set * GB) // GB == limit


def test_the_limit_never_falls_nor_moves_while_rows_are_under_way() -> None:
    assert next_limit(10, 5, rows=False) == 10
    assert next_limit(10, 20, rows=False) == 20
    assert next_limit(10, 20, rows=True) == 10
