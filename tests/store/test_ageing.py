"""Clocks that are set wrong, and right again, while things grow old."""

from pathlib import Path

import pytest

from mlx_server import limits
from mlx_server.errors import NotFound
from mlx_server.store import Record, Retention, Store
from mlx_server.store.database import DOUBT_SECONDS, AgeClock
from tests.store.make import items, response

pytestmark = pytest.mark.anyio

DAY = 86400.0
YEAR = 365 * DAY
NOW = 55 * YEAR


class Clocks:
    def __init__(self) -> None:
        self.wall, self.steady = NOW, 0.0

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


async def opened(path: Path, clocks: Clocks) -> Store:
    store = await Store.open(path, Retention(days=30), clock=lambda: clocks.wall)
    store._ageing = AgeClock(lambda: clocks.wall, lambda: clocks.steady)
    return store


async def filled(path: Path, clocks: Clocks) -> Store:
    store = await opened(path, clocks)
    for day in (40, 20, 0):
        await store.add(response(f"{day}", at=clocks.wall - day * DAY), "me", items("i"))
    await store.add(Record("conversation", "c", clocks.wall, b"{}"), "me")
    return store


async def kept(store: Store) -> int:
    stats = await store.stats()
    return stats.responses + stats.conversations


async def test_a_conversation_of_the_page_ages_from_its_last_use(path: Path) -> None:
    clocks = Clocks()
    store = await opened(path, clocks)
    for day in (40, 20):
        used = clocks.wall - day * DAY
        await store.put_page_conversation(Record("page conversation", "c", used, b"{}"), "me")
    assert (await store.prune(), await kept(store)) == (0, 1)
    clocks.pass_(11 * DAY)
    assert (await store.prune(), await kept(store)) == (1, 0)
    await store.close()


@pytest.mark.parametrize("leap", [12 * YEAR, 68 * YEAR, 1e12])
async def test_a_clock_that_leaps_ahead_and_comes_back_deletes_nothing(
    path: Path, leap: float
) -> None:
    clocks = Clocks()
    store = await filled(path, clocks)
    assert await store.prune() == 1, "as ever"
    clocks.wall += leap
    await store.add(response("ahead", at=clocks.wall), "me")
    for _ in range(4):
        clocks.pass_(3600)
        assert await store.prune() == 0
    await store.close()
    store = await opened(path, clocks)  # started anew, it knows no better
    assert await store.prune() == 0
    clocks.wall -= leap
    assert await store.prune() == 0
    assert await kept(store) == 4
    clocks.pass_(31 * DAY)
    assert await store.prune() == 3, "and then they age as ever"
    await store.close()


async def test_new_records_are_kept_after_a_clock_was_set_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STORED_RESPONSES", 3)
    clocks = Clocks()
    store = await opened(path, clocks)
    for at in range(3):
        await store.add(response(f"ahead{at}", at=clocks.wall), "me")
    clocks.wall -= 3600
    await store.add(response("new", at=clocks.wall), "me")
    assert await store.prune() == 1
    assert (await store.get("response", "new", "me")).id == "new"
    with pytest.raises(NotFound):
        await store.get("response", "ahead0", "me")
    await store.close()


async def test_a_clock_that_stays_ahead_is_believed(path: Path) -> None:
    clocks = Clocks()
    store = await filled(path, clocks)
    await store.prune()
    clocks.wall += 2 * YEAR
    assert await store.prune() == 0
    clocks.pass_(DOUBT_SECONDS)
    assert await store.prune() == 3
    await store.close()


@pytest.mark.parametrize("back", [3600.0, 20 * YEAR, NOW])
async def test_a_clock_that_goes_back(path: Path, back: float) -> None:
    clocks = Clocks()
    store = await filled(path, clocks)
    await store.prune()
    clocks.wall -= back
    assert await store.prune() == 0
    await store.add(response("back", at=clocks.wall), "me")
    clocks.wall += back
    assert await store.prune() == 0
    assert await kept(store) == 4
    await store.close()


async def test_a_count_holds_whatever_the_clock_says(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks()
    store = await filled(path, clocks)
    await store.close()
    monkeypatch.setattr(limits, "STORED_RESPONSES", 1)
    store = await opened(path, clocks)
    await store.prune()
    clocks.wall += 12 * YEAR
    await store.add(response("new", at=clocks.wall), "me")
    assert await store.prune() == 1
    await store.close()
