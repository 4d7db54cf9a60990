"""Leases count the tokens of their rows."""

from typing import Any, cast

import pytest

from mlx_server.engine.kv_cost import KvCost
from mlx_server.engine.messages import Generate, Token
from mlx_server.pool.lease import SOON, Lease, Leases, MemoryDemand
from mlx_server.requests import SamplingParams

MODEL: Any = None


class Reserved(dict[int, int]):
    """What each ticket's rows may take."""

    def leases(self) -> Leases:
        return Leases(lambda: cast(Any, None), lambda ticket: None, self.__setitem__)


def begun(leases: Leases, ticket: int, row: int) -> Lease:
    leases.add(MODEL, MemoryDemand(KvCost(1), 1, 10_000), ticket)
    rows = [Generate(row, "a", [1], 10_000, [], SamplingParams())]
    leases[ticket].began(rows)
    return leases[ticket]


@pytest.mark.parametrize("by", ["row", "lease"])
def test_a_lease_of_a_lost_engine_ends_without_one_that_has_its_numbers(by: str) -> None:
    reserved = Reserved()
    leases = reserved.leases()
    old = begun(leases, ticket=1, row=7)
    begun(leases, ticket=2, row=7)
    if by == "row":
        old.left([7])
    else:
        leases.remove(1)
    for _ in range(2 * SOON):
        leases.count_tokens([Token(7, 5)])
    assert reserved[2] > SOON + 1
