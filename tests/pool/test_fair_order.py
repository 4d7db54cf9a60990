"""Clients take turns, and each row of a client counts."""

from collections import Counter

from mlx_server.pool.policy import TURN, Grant, ModelFacts
from tests.pool.policies import policy_of


def test_clients_take_turns() -> None:
    policy = policy_of(a=ModelFacts(4), ready="a")
    assert policy.request(0, "a", 6, 5.0, client="many") == (Grant(0),)
    for ticket in (1, 2, 3):
        policy.request(ticket, "a", 6, 5.0, client="many")
    policy.request(4, "a", 6, 6.0, client="few")
    policy.request(5, "a", 6, 6.0, client="few")
    granted = []
    for ticket in (0, 4, 1, 5, 2, 3):
        granted += list(policy.release(ticket, 7.0))
    assert granted == [Grant(4), Grant(1), Grant(5), Grant(2), Grant(3)]


def test_programs_of_one_address_share_the_turns_of_a_client() -> None:
    policy = policy_of(a=ModelFacts(4), ready="a")
    policy.request(0, "a", 6, 5.0, client="192.0.2.7")
    clients = [*(f"127.0.0.1 {at}" for at in range(3)), "192.0.2.7"] * 20
    for ticket, client in enumerate(clients, 1):
        policy.request(ticket, "a", 6, 5.0, client=client)
    last, turns = 0, []
    for _ in range(24):
        (grant,) = policy.release(last, 6.0)
        assert isinstance(grant, Grant)
        last = grant.ticket
        turns.append(clients[last - 1])
    counts = Counter(turns)
    assert 10 <= counts["192.0.2.7"] <= 14
    assert all(2 <= counts[f"127.0.0.1 {at}"] <= 6 for at in range(3))


def test_rows_count_and_newcomers_pass_nobody_for_ever() -> None:
    policy = policy_of(a=ModelFacts(4), ready="a")
    assert policy.request(0, "a", 2, 5.0, rows=3, client="many") == (Grant(0),)
    policy.request(1, "a", 6, 5.0, client="many")
    now, last, passed = 6.0, 0, 0
    for ticket in range(2, 1000):
        policy.request(ticket, "a", 6, now, client=f"newcomer {ticket}")
        (grant,) = policy.release(last, now)
        assert isinstance(grant, Grant)
        last, passed = grant.ticket, passed + 1
        if last == 1:
            break
    assert last == 1
    assert 3 < passed <= 3 * TURN + 1
