"""The bytes that a row's tokens take in the caches."""

import pytest

from mlx_server.engine.messages import PADDING_SHARE, PREFILL_PADDING, STEP, KvCost

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


def test_no_more_tokens_are_counted_than_are_wanted() -> None:
    assert MIXED.tokens_in(1 << 30, 9000) == 9000


def test_padding_takes_its_share_of_the_room() -> None:
    assert MIXED.most_padding(14 * PADDING_SHARE * 100) == 100
    assert MIXED.most_padding(-1) == 0
    assert KvCost(fixed=7).most_padding(1 << 30) is None
    assert MIXED.padding_bytes(100) == 14 * (100 + PREFILL_PADDING)
