"""Bytes that many share: in turn, never more than there are, and given back by who leaves."""

import asyncio

import pytest

from mlx_server.api.responses.web_socket import UnstoredContext
from mlx_server.store import ItemRecord
from mlx_server.system.shared_budget import SharedBudget
from tests.store.make import limit, runs


@runs
async def test_first_come_first_served() -> None:
    budget = SharedBudget(10)
    first, second, third = (budget.reserve(size) for size in (6, 6, 2))
    await asyncio.sleep(0)
    assert [f.done() for f in (first, second, third)] == [True, False, False], "none is overtaken"
    assert not budget.take(1)
    budget.give_back(6)
    assert second.done()
    assert third.done()
    assert budget.used == 8
    assert budget.take(2)
    assert not budget.take(1)


@runs
async def test_who_leaves_the_line_is_passed_over() -> None:
    budget = SharedBudget(10)
    assert budget.take(10)
    first, second = budget.reserve(5), budget.reserve(5)
    first.cancel()
    budget.give_back(10)
    assert second.done()
    assert budget.used == 5


def said(size: int) -> list[ItemRecord]:
    return [ItemRecord("i", b"x" * size)]


def test_a_connection_remembers_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "SOCKET_MEMORY_BYTES", 100)
    budget = SharedBudget(150)
    memory, other = UnstoredContext(budget), UnstoredContext(budget)
    for n in range(3):
        memory.keep(f"{n}", said(40))
    assert list(memory.contexts) == ["1", "2"]
    memory.keep("large", said(101))
    assert list(memory.contexts) == ["1", "2"]
    memory.keep("2", said(60))
    assert list(memory.contexts) == ["1", "2"]
    assert budget.used == 100
    other.keep("a", said(60))
    assert not other.contexts, "there is no room for it in all"
    other.keep("b", said(50))
    assert budget.used == 150
    for each in (memory, other):
        each.clear()
    assert budget.used == 0
