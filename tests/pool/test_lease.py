"""Leases count the tokens of their rows."""

from typing import Any, cast

import pytest

from mlx_server.engine.messages import Generate, KvCost, StepOutput, Stop, Token
from mlx_server.generation.plan import plan
from mlx_server.pool import lease as lease_of_rows
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.lease import SOON, Lease, Leases, MemoryDemand
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import GenerateRequest, SamplingParams
from tests.pool.machine import BYTES, ONE, WEIGHTS, Machine, asks, held, run, running

MODEL: Any = None


class Reserved(dict[int, int]):
    """What each ticket's rows may take."""

    def leases(self) -> Leases:
        return Leases(lambda: cast("Any", None), lambda ticket: None, self.__setitem__)


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


def row(number: int, prompt: int = 2) -> Generate:
    return Generate(number, "a", [1] * prompt, 99, [], SamplingParams())


def step(machine: Machine, *numbers: int, finish: Stop | None = None) -> None:
    """Each of these rows gets a token."""
    tokens = [Token(number, 1, finish) for number in numbers]
    machine.report(StepOutput("a", tokens, 0, active_bytes=0, cache_bytes=0))


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is reserved for ten tokens at a time, three before they are needed."""
    monkeypatch.setattr(lease_of_rows, "SOON", 10)
    monkeypatch.setattr(lease_of_rows, "MARGIN", 3)


@pytest.mark.parametrize("budget", [100, 1000])
def test_the_engine_may_pad_rows_by_what_requests_reserve_for_it(a: ModelSpec, budget: int) -> None:
    async def test() -> None:
        async with running(a, limits=PoolLimits(budget=budget)) as (pool, machine):
            await held(pool)
            most = BYTES.most_padding(budget - WEIGHTS)
            assert machine.most_padding == {"a": most}
            request = GenerateRequest("a", ((1,) * 10,))
            planned = plan(await pool.prepared("a"), request)
            assert planned.demand.padding_bytes == BYTES.padding_bytes(most or 0)

    run(test)


@pytest.mark.usefixtures("ahead")
def test_rows_reserve_memory_as_they_grow_and_the_last_wait_for_it(a: ModelSpec) -> None:
    async def test() -> None:
        async with running(a, limits=ONE) as (pool, machine):
            prepared = await pool.prepared("a")
            async with (
                pool.lease(prepared, asks(2, most=40)) as first,
                pool.lease(prepared, asks(2, most=40)) as last,
            ):
                first.began([row(1)])
                last.began([row(2), row(3)])
                assert pool.memory()["kv_reserved"] == 12 + 12
                for _ in range(7):
                    step(machine, 1)
                assert pool.memory()["kv_reserved"] == 12 + 12
                step(machine, 1, 77)
                assert pool.memory()["kv_reserved"] == 20 + 20
                for _ in range(8):
                    step(machine, 1, 3)
                assert machine.log == ["load a", "preempt [2, 3]"]
                assert pool.memory()["kv_reserved"] == 28
                last.left([3])
                last.began([row(4)])
                assert machine.log[2:] == ["preempt [4]"], "it came too late to be preempted"
                step(machine, 1, finish="stop")
                assert machine.log[3:] == ["resume [2, 4]"]
                assert pool.memory()["kv_reserved"] == 2 * 20
                last.left([2, 4])
                assert pool.memory()["kv_reserved"] == 0
            assert pool.engines[0].scheduler.leases.of_row == {}

    run(test)
