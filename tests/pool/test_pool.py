"""The pool, who finds room in its queue, leases, and next prompts, rendered in threads."""

import asyncio
from contextlib import ExitStack
from typing import Any, cast

import pytest

from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import (
    Command,
    ComputeAhead,
    Generate,
    KvCost,
    StepOutput,
    Stop,
    Token,
)
from mlx_server.errors import Overloaded, ServerError
from mlx_server.generation.plan import plan
from mlx_server.pool import lease as lease_of_rows
from mlx_server.pool.engine_models import NextPrompts, PoolLimits
from mlx_server.pool.lease import SOON, Lease, Leases, MemoryDemand
from mlx_server.pool.pool import Pool, RowSlots
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import GenerateRequest, SamplingParams
from tests.pool.machine import (
    BYTES,
    ONE,
    WEIGHTS,
    Holding,
    Machine,
    advance,
    asks,
    held,
    running,
    state,
    view,
)

pytestmark = pytest.mark.anyio


def test_a_full_queue_refuses_and_a_place_that_is_left_is_taken(a: ModelSpec) -> None:
    pool = Pool([a], PoolLimits(concurrency=2, queue=3))
    with pool.row_slots.take(1), pool.row_slots.take(3):
        assert pool.row_slots.taken == 4
        with pytest.raises(Overloaded, match="4 answers") as caught, pool.row_slots.take(2):
            pass
        assert "Retry-After" in caught.value.headers
        with pool.row_slots.take(2, "another client"):
            assert pool.row_slots.taken == 6
        assert pool.row_slots.taken == 4
        with pool.row_slots.take(1):
            assert pool.row_slots.taken == 5
    assert pool.row_slots.taken == 0
    with pool.row_slots.take(5):
        assert pool.row_slots.taken == 5


async def test_a_view_says_what_is_known(a: ModelSpec) -> None:
    async with running(a) as (pool, _):
        unseen = view(pool)
        assert (unseen.family, unseen.nbytes, unseen.last_used) == (None, 0, None)
        await pool.prepared("a")
        assert (view(pool).family, view(pool).nbytes) == ("plain", WEIGHTS)
        async with Holding(pool, "a"):
            assert (view(pool).leases, state(pool)) == (1, "ready")
        first = view(pool).last_used
        assert first
        advance(10)
        await held(pool)
        assert view(pool).last_used == pytest.approx(first, abs=5), "the clock of the wall"


def taken(places: RowSlots, on: ExitStack, client: str, rows: int = 1) -> int:
    """How many requests of so many answers it got in, until the first was refused."""
    for count in range(1000):
        try:
            on.enter_context(places.take(rows, client))
        except Overloaded:
            return count
    raise AssertionError("there is no end to it")


@pytest.mark.parametrize("most", [*range(1, 40), 80, 300])
def test_a_client_alone_gets_all_that_was_promised(most: int) -> None:
    with ExitStack() as on:
        assert taken(RowSlots(most), on, "a") == most
    with ExitStack() as on:
        assert taken(RowSlots(most), on, "a", rows=most) == 1


@pytest.mark.parametrize("first", [1, 5, 16])
def test_one_client_keeps_nobody_out(first: int) -> None:
    places = RowSlots(80)
    with ExitStack() as on:
        assert taken(places, on, "hog", first) == 80 // first
        assert taken(places, on, "second") >= 16
        for other in "cde":
            assert taken(places, on, other) >= 1
        with pytest.raises(Overloaded) as caught:
            on.enter_context(places.take(1, "hog"))
        assert "answers are being generated or waiting, 80 of them yours" in caught.value.message
        assert "Retry-After" in caught.value.headers
        assert places.taken <= places.total == 107
    assert places.taken == 0


def test_programs_of_one_address_leave_room_for_others() -> None:
    places = RowSlots(80)
    with ExitStack() as on:
        assert taken(places, on, "127.0.0.1 0") == 80
        assert [taken(places, on, f"127.0.0.1 {at}") for at in range(1, 8)] == [11, *[0] * 6]
        assert taken(places, on, "192.0.2.7") >= 10
    with ExitStack() as on:
        assert taken(places, on, "192.0.2.7") == 80
        assert taken(places, on, "127.0.0.1 0") >= 16


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
async def test_the_engine_may_pad_rows_by_what_requests_reserve_for_it(
    a: ModelSpec, budget: int
) -> None:
    async with running(a, limits=PoolLimits(budget=budget)) as (pool, machine):
        await held(pool)
        most = BYTES.most_padding(budget - WEIGHTS)
        assert machine.most_padding == {"a": most}
        request = GenerateRequest("a", ((1,) * 10,))
        planned = plan(await pool.prepared("a"), request)
        assert planned.demand.padding_bytes == BYTES.padding_bytes(most or 0)


@pytest.mark.usefixtures("ahead")
async def test_rows_reserve_memory_as_they_grow_and_the_last_wait_for_it(a: ModelSpec) -> None:
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


class Engine:
    def __init__(self) -> None:
        self.ahead: list[ComputeAhead] = []

    def send(self, command: Command) -> None:
        if isinstance(command, ComputeAhead):
            self.ahead.append(command)


@pytest.mark.parametrize(
    ("error", "is_logged"), [(ServerError("no message fits"), False), (KeyError("name"), True)]
)
def test_what_can_not_be_rendered_is_not_sent(
    error: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    command, engine = ComputeAhead("m", [1, 2], 70), Engine()

    def failing() -> ComputeAhead:
        raise error

    async def both() -> None:
        prompts = NextPrompts(lambda: cast(EngineClient, engine))
        for render in (failing, lambda: command):
            prompts.begin("m", render)
        await asyncio.gather(*prompts.rendering._tasks)

    asyncio.run(both())
    assert engine.ahead == [command]
    assert ("next prompt" in caplog.text) == is_logged
