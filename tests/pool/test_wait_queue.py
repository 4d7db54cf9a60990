"""Which requests may be served before one that waits."""

import pytest

from mlx_server.pool.policy import (
    Grant,
    LoadAction,
    ModelFacts,
    Policy,
    Refuse,
    UnloadAction,
    WaitedTooLong,
)
from tests.pool.policies import policy_of


def test_waits_its_turn_within_one_model() -> None:
    policy = policy_of(a=ModelFacts(5), ready="a")
    assert policy.request(1, "a", 4, 5.0) == (Grant(1),)
    assert policy.request(2, "a", 2, 5.0) == ()
    assert policy.request(3, "a", 1, 5.0) == ()
    assert policy.release(1, 6.0) == (Grant(2), Grant(3))


def test_passes_one_that_waits_for_its_load() -> None:
    policy = policy_of(a=ModelFacts(3), b=ModelFacts(3), c=ModelFacts(1), ready="a")
    assert policy.request(1, "b", 3, 5.0) == (LoadAction("b"),)
    assert policy.request(2, "a", 1, 5.0) == (Grant(2),)
    assert policy.request(3, "a", 1, 5.0) == (), "1 was promised those bytes"
    assert policy.request(4, "c", 0, 5.0) == (), "models are loaded in order of arrival"
    assert policy.loaded("b", 3, 6.0) == (Grant(1),)
    assert policy.release(1, 7.0) == (Grant(3), LoadAction("c"))


def test_passes_one_that_is_stuck_only_if_both_fit_side_by_side() -> None:
    policy = policy_of(p=ModelFacts(1, pinned=True), a=ModelFacts(5), b=ModelFacts(6), ready="pa")
    assert policy.request(1, "a", 2, 5.0) == (Grant(1),)
    assert policy.request(2, "b", 1, 5.0) == ()
    assert policy.request(3, "a", 0, 5.0) == (), "a must go for b to come"
    assert policy.request(4, "p", 2, 5.0) == (Grant(4),)
    assert policy.request(5, "p", 1, 5.0) == (), "8 are for p and b, 2 were given to 4"
    assert policy.release(1, 6.0) == (UnloadAction("a"),)
    assert policy.unloaded("a", 7.0) == (LoadAction("b"),)
    assert policy.loaded("b", 6, 8.0) == (Grant(2),)


def stuck() -> Policy:
    """Of 12, 8 are for c and its KV cache, 2 for p, and 1 for b if that stays."""
    policy = policy_of(
        budget=12,
        ready="pab",
        p=ModelFacts(2, pinned=True),
        a=ModelFacts(5),
        b=ModelFacts(1),
        c=ModelFacts(5),
    )
    assert policy.request(1, "a", 1, 5.0) == (Grant(1),)
    assert policy.request(2, "c", 3, 6.0) == ()
    return policy


@pytest.mark.parametrize(
    ("model", "kv_bytes", "passes"),
    [("p", 2, True), ("p", 3, False), ("b", 1, True), ("b", 2, False)],
)
def test_who_passes_one_that_is_stuck(model: str, kv_bytes: int, passes: bool) -> None:
    policy = stuck()
    assert policy.request(3, model, kv_bytes, 7.0) == ((Grant(3),) if passes else ())


def test_what_has_passed_is_held_against_the_next() -> None:
    policy = stuck()
    assert policy.request(3, "p", 2, 7.0) == (Grant(3),)
    assert policy.request(4, "b", 0, 8.0) == (), "b, p with its 2 bytes, and 8 make 13"


def test_a_pinned_model_that_is_still_to_come_is_held_against_them_too() -> None:
    policy = policy_of(
        budget=12,
        ready="abc",
        p=ModelFacts(1, pinned=True),
        a=ModelFacts(3),
        b=ModelFacts(6),
        c=ModelFacts(3),
    )
    for ticket, model in enumerate("abc"):
        assert policy.request(ticket, model, 0, 5.0) == (Grant(ticket),)
    assert policy.request(3, "p", 0, 6.0) == ()
    assert policy.request(4, "a", 3, 7.0) == ()
    assert policy.request(5, "b", 0, 8.0) == (), "p stays, and with b there are 5 left for 4"


def test_models_are_loaded_in_order_of_arrival() -> None:
    policy = policy_of(a=ModelFacts(6), b=ModelFacts(6), c=ModelFacts(2), ready="a")
    assert policy.request(1, "a", 1, 5.0) == (Grant(1),)
    assert policy.request(2, "b", 1, 5.0) == ()
    assert policy.request(3, "c", 0, 5.0) == (), "there is room now, but 2 comes first"
    assert policy.release(1, 6.0) == (UnloadAction("a"), LoadAction("c"))


def test_two_who_wait_for_one_model_count_it_once() -> None:
    policy = policy_of(
        p=ModelFacts(1, pinned=True), a=ModelFacts(6), b=ModelFacts(6), c=ModelFacts(1), ready="pa"
    )
    assert policy.request(1, "b", 1, 5.0) == (UnloadAction("a"),)
    assert policy.request(2, "b", 1, 5.0) == ()
    assert policy.request(3, "c", 0, 5.0) == (LoadAction("c"),)


def test_whoever_is_no_longer_in_the_way_lets_others_go() -> None:
    policy = policy_of(a=ModelFacts(5), ready="a")
    assert policy.request(1, "a", 1, 5.0) == (Grant(1),)
    assert policy.request(2, "a", 5, 6.0) == ()
    assert policy.request(3, "a", 1, 7.0) == ()
    assert policy.tick(36.0) == (Refuse(2, WaitedTooLong(30.0)), Grant(3))
    assert policy.request(4, "a", 5, 40.0) == ()
    assert policy.request(5, "a", 1, 41.0) == ()
    assert policy.cancel(4, 42.0) == (Grant(5),)
