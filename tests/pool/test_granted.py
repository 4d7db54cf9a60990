"""Granted rows grow, are preempted when there is no more room, and go on in order."""

from mlx_server.pool.policy import (
    Grant,
    LoadAction,
    ModelFacts,
    PreemptAction,
    ResumeAction,
    ShrinkCache,
)
from tests.pool.policies import policy_of


def test_rows_that_have_not_begun_take_no_memory_from_the_prompt_cache_yet() -> None:
    policy = policy_of(a=ModelFacts(3), ready=["a"])
    policy.cache_bytes(7)
    assert policy.request(1, "a", 4, now=1, extra_bytes=1) == (ShrinkCache(2), Grant(1))
    assert (policy.used, policy.in_use) == (3 + 4 + 1 + 2, 3 + 1)
    policy.begin(1)
    assert policy.in_use == 3 + 4 + 1
    policy.release(1, now=2)
    policy.begin(1)  # it was cancelled meanwhile
    assert policy.in_use == 3


def test_rows_grow_while_there_is_room_and_the_last_give_way() -> None:
    policy = policy_of(a=ModelFacts(4), ready="a")
    for ticket in (1, 2, 3):
        asked = policy.request(ticket, "a", 1, 5.0, most_kv_bytes=4)
        assert asked == (Grant(ticket),)
    assert (policy.used, policy.kv_reserved) == (7, 3)
    assert policy.resize(1, 2, 6.0) == (), "all three rows are as long as the longest"
    assert policy.used == 10
    assert policy.resize(2, 3, 7.0) == (PreemptAction(3),)
    assert policy.used == 10
    assert policy.resize(2, 4, 8.0) == (PreemptAction(2),), "the longest itself, if it is the last"
    assert policy.resize(1, 4, 9.0) == ()
    assert (policy.used, policy.preempted) == (8, (2, 3))
    assert policy.release(1, 10.0) == (ResumeAction(2),)
    assert policy.request(4, "a", 1, 11.0) == (), "those that were preempted come first"
    assert policy.release(2, 12.0) == (ResumeAction(3), Grant(4))


def test_what_came_to_nothing_grows_no_more() -> None:
    policy = policy_of(a=ModelFacts(4), ready="a")
    assert policy.request(1, "a", 1, 5.0, most_kv_bytes=2) == (Grant(1),)
    assert policy.resize(1, 99, 6.0) == ()
    assert policy.kv_reserved == 2
    policy.engine_lost(7.0)
    assert policy.resize(1, 2, 8.0) == ()
    assert policy.used == 0


def test_a_lost_engine_takes_leases_but_not_those_who_wait() -> None:
    policy = policy_of(a=ModelFacts(6), b=ModelFacts(4), ready="a")
    assert policy.cache_bytes(1) == ()
    assert policy.request(1, "a", 2, 5.0) == (Grant(1),)
    assert policy.request(2, "a", 3, 5.0) == ()
    assert policy.engine_lost(6.0) == (LoadAction("a"),)
    assert policy.release(1, 7.0) == ()
    assert (policy.used, policy.cache) == (6, 0)
    assert policy.loaded("a", 6, 8.0) == (Grant(2),)
