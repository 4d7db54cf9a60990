"""Which models stay in memory, and which are unloaded first."""

import math

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


def test_evicts_the_least_recently_used_and_no_more_than_needed() -> None:
    policy = policy_of(
        a=ModelFacts(3), b=ModelFacts(3), c=ModelFacts(3), d=ModelFacts(4), ready="abc"
    )
    assert policy.request(1, "a", 0, 5.0) == (Grant(1),)
    assert policy.release(1, 6.0) == ()
    assert policy.request(2, "d", 0, 7.0) == (UnloadAction("b"),)
    assert policy.tick(8.0) == ()
    assert policy.unloaded("b", 9.0) == (LoadAction("d"),)
    assert policy.used == 10


def test_spares_an_old_model_whose_size_does_not_help() -> None:
    policy = policy_of(a=ModelFacts(1), b=ModelFacts(8), c=ModelFacts(9), ready="ab")
    assert policy.request(1, "c", 0, 5.0) == (UnloadAction("b"),)


def test_a_request_may_say_how_long_a_model_stays() -> None:
    policy = policy_of(a=ModelFacts(6, ttl=60), ready="a")
    assert policy.views()["a"].stale_at == 60
    assert policy.keep("a", math.inf, 1.0) == ()
    assert (policy.views()["a"].stale_at, policy.next_deadline()) == (None, None)
    assert policy.keep("a", 5, 2.0) == ()
    assert policy.next_deadline() == 5
    assert policy.tick(5.0) == (UnloadAction("a"),)
    assert policy.unloaded("a", 6.0) == ()
    policy.request(1, "a", 0, 7.0)
    policy.loaded("a", 6, 8.0)
    policy.release(1, 9.0)
    assert policy.views()["a"].stale_at == 69, "once it is loaded again, its own time counts"


def test_a_model_that_is_not_kept_goes_after_its_last_lease() -> None:
    policy = policy_of(a=ModelFacts(6), b=ModelFacts(3, pinned=True), ready="ab")
    policy.request(1, "a", 0, 5.0)
    assert policy.keep("a", 0, 6.0) == ()
    assert policy.release(1, 7.0) == (UnloadAction("a"),)
    assert policy.keep("b", 0, 8.0) == (), "a pinned model stays"


def test_a_model_that_is_not_in_memory_is_not_kept() -> None:
    policy = policy_of(a=ModelFacts(6))
    assert policy.keep("a", 0, 1.0) == ()
    policy.request(1, "a", 0, 2.0)
    policy.loaded("a", 6, 3.0)
    assert policy.release(1, 4.0) == ()


def test_what_is_being_unloaded_counts_until_it_is_gone() -> None:
    policy = policy_of(a=ModelFacts(6), b=ModelFacts(6), ready="a")
    assert policy.request(1, "b", 0, 5.0) == (UnloadAction("a"),)
    assert policy.used == 6
    assert policy.request(2, "a", 0, 6.0) == ()
    assert policy.unloaded("a", 7.0) == (LoadAction("b"),)
    assert policy.loaded("b", 6, 8.0) == (Grant(1),)
    assert policy.release(1, 9.0) == (UnloadAction("b"),)
    assert policy.unloaded("b", 10.0) == (LoadAction("a"),)


def test_nothing_is_evicted_while_that_would_not_be_enough() -> None:
    policy = policy_of(a=ModelFacts(2), b=ModelFacts(4), c=ModelFacts(8), ready="ab")
    assert policy.request(1, "b", 1, 5.0) == (Grant(1),)
    assert policy.request(2, "c", 1, 6.0) == ()
    assert policy.release(1, 7.0) == (UnloadAction("a"), UnloadAction("b"))


def test_pinned_models_stay() -> None:
    policy = policy_of(a=ModelFacts(4, pinned=True), b=ModelFacts(4), c=ModelFacts(6), ready="ab")
    assert policy.request(1, "c", 0, 5.0) == (UnloadAction("b"),)
    assert policy.request(2, "c", 1, 6.0) == (Refuse(2, NeverFits(needed=7, available=6)),)


def test_evicts_no_model_that_an_earlier_ticket_waits_for() -> None:
    policy = policy_of(a=ModelFacts(3), b=ModelFacts(4), c=ModelFacts(5), ready="ba")
    assert policy.request(1, "a", 5, 5.0) == (UnloadAction("b"),)
    assert policy.request(2, "c", 0, 5.0) == ()
    assert policy.unloaded("b", 6.0) == (Grant(1),)


def test_idle_models_go_after_their_time() -> None:
    policy = policy_of(
        a=ModelFacts(3, ttl=60), b=ModelFacts(3, ttl=60, pinned=True), c=ModelFacts(3), ready="abc"
    )
    assert policy.next_deadline() == 60.0
    assert policy.request(1, "a", 1, 50.0) == (Grant(1),)
    assert policy.next_deadline() is None
    assert policy.tick(500.0) == ()
    assert policy.release(1, 501.0) == ()
    assert policy.tick(560.9) == ()
    assert policy.next_deadline() == 561.0
    assert policy.tick(561.0) == (UnloadAction("a"),)


def test_a_model_larger_than_estimated_drives_idle_ones_out() -> None:
    policy = policy_of(a=ModelFacts(3), b=ModelFacts(3), c=ModelFacts(4), ready="ab")
    policy.cache_bytes(4)
    assert policy.request(1, "c", 0, 5.0) == (ShrinkCache(0), LoadAction("c"))
    assert policy.loaded("c", 6, 6.0) == (UnloadAction("a"),)
    assert policy.unloaded("a", 7.0) == (Grant(1),)
    assert policy.views()["c"].nbytes == 6
