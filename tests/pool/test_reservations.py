"""The memory of rows in a batch: the longest counts for all, up to the padding that is reserved."""

import pytest

from mlx_server.engine.kv_cost import KvCost
from mlx_server.pool.policy import (
    Grant,
    LoadAction,
    ModelFacts,
    NeverFits,
    Refuse,
    ShrinkCache,
    UnloadAction,
)
from tests.pool.policies import policy_of


def test_a_batch_keeps_all_its_rows_as_long_as_its_longest() -> None:
    policy = policy_of(budget=30, a=ModelFacts(5), b=ModelFacts(5), ready="ab")
    assert policy.request(1, "a", 1, 5.0, rows=3) == (Grant(1),)
    assert policy.kv_reserved == 3
    assert policy.request(2, "b", 4, 5.0, extra_bytes=2) == (Grant(2),)
    assert policy.kv_reserved == 3 + 6
    assert policy.request(3, "a", 4, 5.0) == (), "16 of 20"
    assert policy.release(2, 6.0) == (Grant(3),)
    assert policy.kv_reserved == 16
    assert policy.release(3, 7.0) == ()
    assert policy.kv_reserved == 3
    assert policy.request(4, "a", 7, 8.0, rows=4) == (Refuse(4, NeverFits(33, 30)),)


def test_padding_takes_no_more_than_the_engine_says() -> None:
    policy = policy_of(budget=40, a=ModelFacts(5), ready="a")
    assert policy.request(1, "a", 1, 5.0, rows=8, padding_bytes=4) == (Grant(1),)
    assert policy.kv_reserved == 8
    assert policy.request(2, "a", 16, 5.0, padding_bytes=4) == (Grant(2),), "9 rows of 16 are 144"
    assert policy.kv_reserved == 8 + 16 + 4
    assert policy.request(3, "a", 8, 5.0, padding_bytes=4) == (), "36 of 35"


@pytest.mark.parametrize(
    ("budget", "weights", "per_token", "one_batch", "in_groups"),
    [
        pytest.param(11.4, 4.6, 131_072, 0, 11, id="8b"),
        pytest.param(22.9, 4.6, 131_072, 3, 33, id="8b, more memory"),
        pytest.param(22.9, 17.2, 98_304, 0, 16, id="30b-a3b"),
        pytest.param(34.4, 17.2, 98_304, 4, 33, id="30b-a3b, more memory"),
    ],
)
def test_short_rows_next_to_a_long_one(
    budget: float, weights: float, per_token: int, one_batch: int, in_groups: int
) -> None:
    """worker/README.md has the first of these."""
    kv, memory, model = KvCost(per_token), int(budget * 1e9), int(weights * 1e9)
    most_padding = kv.most_padding(memory - model)
    assert most_padding is not None

    def granted(padding: int | None) -> int:
        policy = policy_of(budget=memory, a=ModelFacts(model), ready="a")
        for row in range(34):
            tokens = 300 if row else 30_000
            soon, most = kv.for_tokens(tokens + 512), kv.for_tokens(tokens + 16_384)
            done = policy.request(row, "a", soon, 5.0, most_kv_bytes=most, padding_bytes=padding)
            if Grant(row) not in done:
                return row - 1
        return 33

    assert granted(None) == one_batch
    assert granted(kv.padding_bytes(most_padding)) == in_groups


def test_a_promise_is_kept_when_later_ones_take_what_was_shared() -> None:
    """Ticket 1 can grow to 3, in memory that others may use until then."""
    facts = {"a": ModelFacts(3), "c": ModelFacts(3), "d": ModelFacts(1)}
    policy = policy_of(budget=11, ready="cad", **facts)
    assert policy.request(1, "a", 0, 5.0, most_kv_bytes=3) == (Grant(1),)
    assert policy.request(2, "c", 0, 5.0, extra_bytes=1) == (Grant(2),)
    assert policy.request(3, "a", 2, 6.0, most_kv_bytes=2, rows=2) == ()
    assert policy.request(4, "d", 1, 7.0, most_kv_bytes=1) == ()
    assert policy.request(5, "d", 1, 8.0, most_kv_bytes=1) == ()
    assert policy.release(2, 9.0) == (UnloadAction("c"), Grant(4)), "with 5, a would lack one byte"
    assert policy.unloaded("c", 10.0) == (Grant(3),)


def test_room_is_kept_for_one_to_come_to_its_end() -> None:
    policy = policy_of(a=ModelFacts(4), b=ModelFacts(1), ready="a")
    assert policy.request(1, "a", 1, 5.0, most_kv_bytes=6) == (Grant(1),)
    assert policy.request(2, "b", 1, 5.0) == (), "it might need the room for b at its end"
    assert policy.cache_bytes(5) == (), "which the prompt cache may have until then"
    assert policy.resize(1, 3, 6.0) == (ShrinkCache(3),)
    assert policy.resize(1, 0, 7.0) == ()
    assert policy.release(1, 8.0) == (LoadAction("b"),)
