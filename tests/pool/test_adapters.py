"""Adapters in memory: loaded once, leased, dropped. The engine does what the test tells it to."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_server import limits as table
from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import AdapterLoaded
from mlx_server.errors import AdapterInvalid, AdapterNotFound, BadRequest, EngineDied
from mlx_server.models import adapter_catalog as catalog_module
from mlx_server.models.adapter_catalog import AdapterCatalog, AdapterLocation, BaseModelShapes
from mlx_server.models.adapter_reader import AdapterSpec, read_adapter, stamp_of
from mlx_server.pool.adapters import AdapterPool, LeasedAdapter, allowed_folder, find_adapter
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from tests.pool.machine import TWO, asks, running, turns

FILE, LOADED = 90, 100
"""Bytes of every adapter: by its file, and once it is there."""


pytestmark = pytest.mark.anyio


class Engine:
    """Keeps its replies back while it is silent."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.failure: Exception | None = None
        self.speaks = asyncio.Event()
        self.speaks.set()

    async def load_adapter(self, model: str, adapter: str, path: str) -> AdapterLoaded:
        self.log.append(f"load {model} {adapter}")
        await self.speaks.wait()
        if self.failure:
            raise self.failure
        return AdapterLoaded(model, adapter, LOADED)

    async def unload_adapter(self, model: str, adapter: str) -> None:
        self.log.append(f"unload {model} {adapter}")
        if self.failure:
            raise self.failure


class Desk:
    def __init__(self) -> None:
        self.engine = Engine()
        self.changes = 0
        self.adapters = AdapterPool(lambda: cast(EngineClient, self.engine), self._changed)

    def _changed(self) -> None:
        self.changes += 1

    async def used(self, adapter: LeasedAdapter, model: str = "m") -> None:
        async with self.adapters.lease(model, adapter):
            pass

    def using(self, adapter: LeasedAdapter, model: str = "m") -> asyncio.Task[None]:
        return asyncio.create_task(self.used(adapter, model))

    async def held(self, adapter: LeasedAdapter, model: str = "m") -> AsyncExitStack:
        stack = AsyncExitStack()
        await stack.enter_async_context(self.adapters.lease(model, adapter))
        return stack

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.adapters.loaded_for("m")]


def an_adapter(name: str, *, digest: str | None = None) -> LeasedAdapter:
    spec = AdapterSpec(name, Path(name), digest or name, 8, FILE, "lora", None, "mlx")
    return LeasedAdapter(spec)


A, B, C = map(an_adapter, "abc")


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, reported: unheard.append(reported)
    )
    yield Desk()
    await turns()
    assert unheard == []


async def test_what_changes_while_it_loads_is_not_served_under_the_digest_of_what_was_there(
    desk: Desk,
    tmp_path: Path,
) -> None:
    weights = tmp_path / "adapters.safetensors"
    weights.write_bytes(b"old")
    spec = replace(A.spec, path=tmp_path, stamp=stamp_of(tmp_path))

    desk.engine.speaks.clear()
    asking = desk.using(LeasedAdapter(spec))
    await turns()
    weights.write_bytes(b"newer")
    desk.engine.speaks.set()
    with pytest.raises(AdapterInvalid, match="changed while"):
        await asking
    assert (desk.engine.log, desk.names) == (["load m a", "unload m a"], [])
    await desk.used(LeasedAdapter(replace(spec, digest="new", stamp=stamp_of(tmp_path))))
    assert desk.names == ["a"]


async def test_a_row_whose_engine_is_lost_meets_no_other_weights(
    desk: Desk, tmp_path: Path
) -> None:
    weights = tmp_path / "adapters.safetensors"
    weights.write_bytes(b"old")
    leased = LeasedAdapter(replace(A.spec, path=tmp_path, stamp=stamp_of(tmp_path)))

    await desk.used(leased)
    desk.adapters.forget()  # with the engine
    weights.write_bytes(b"newer")
    with pytest.raises(AdapterInvalid, match="changed while"):
        await desk.used(leased)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_load_that_everybody_left_is_counted_when_it_ends(desk: Desk, fails: bool) -> None:
    desk.engine.speaks.clear()
    leaving = desk.using(A)
    await turns()
    leaving.cancel()
    await turns()
    assert desk.adapters.loaded_for("m") == [("a", 0, FILE)]
    desk.engine.failure = AdapterInvalid("no such layer") if fails else None
    changes = desk.changes
    desk.engine.speaks.set()
    await turns()
    assert desk.adapters.loaded_for("m") == ([] if fails else [("a", 0, LOADED)])
    assert desk.adapters.idle_bytes == (0 if fails else LOADED)
    assert desk.changes > changes
    desk.engine.failure = None
    await desk.used(A)
    assert desk.adapters.idle_bytes == LOADED


async def test_bytes_that_are_idle_and_bytes_that_no_lease_reserved(desk: Desk) -> None:
    await desk.used(A)
    held = await desk.held(B)
    wider = LOADED - FILE
    assert desk.adapters.idle_bytes == LOADED
    assert desk.adapters.unreserved_bytes("m") == wider, "than its lease has reserved"
    assert desk.adapters.unreserved_bytes("other") == 0
    changes = desk.changes
    await held.aclose()
    assert desk.adapters.idle_bytes == 2 * LOADED
    assert desk.changes > changes


async def test_the_least_recently_used_gives_way_first_and_what_is_in_use_never(desk: Desk) -> None:
    for adapter in (A, B, C, A):
        await desk.used(adapter)
        await asyncio.sleep(0.001)
    held = await desk.held(C)
    desk.adapters.shrink(2 * LOADED)
    assert desk.names == ["a", "b", "c"], "so much may stay"
    desk.adapters.shrink(2 * LOADED - 1)
    assert desk.names == ["a", "c"]
    desk.adapters.shrink(0)
    assert desk.names == ["c"]
    await turns()
    assert desk.engine.log[3:] == ["unload m b", "unload m a"]
    await held.aclose()
    desk.adapters.shrink(0)
    assert desk.names == []


async def test_dropping_waits_for_its_rows(desk: Desk) -> None:
    anew = an_adapter("a", digest="anew")
    first, second = await desk.held(A), await desk.held(anew)
    await desk.used(B)
    dropping = asyncio.create_task(desk.adapters.drop("m", "a"))
    await turns()
    await first.aclose()
    await turns()
    assert not dropping.done()
    await second.aclose()
    await dropping
    await turns()
    assert desk.names == ["b"]
    assert desk.engine.log[3:] == ["unload m a", "unload m anew"]
    await desk.adapters.drop("m", "unheard of")


async def test_of_two_names_for_the_same_weights_one_is_dropped(desk: Desk) -> None:
    other = an_adapter("other", digest=A.spec.digest)
    first, second = await desk.held(A), await desk.held(other)
    dropping = asyncio.create_task(desk.adapters.drop("m", "a"))
    await turns()
    assert not dropping.done()
    await first.aclose()
    await dropping
    assert desk.adapters.loaded_for("m") == [("other", 1, LOADED)]
    await second.aclose()
    await desk.adapters.drop("m", "other")
    await turns()
    assert desk.engine.log == ["load m a", "unload m a"]


async def test_dropping_does_not_wait_for_those_who_came_later(desk: Desk) -> None:
    first = await desk.held(A)
    dropping = asyncio.create_task(desk.adapters.drop("m", "a"))
    await turns()
    later = await desk.held(A)  # which was loaded again by its name
    await first.aclose()
    await asyncio.wait_for(dropping, 1)
    assert desk.names == ["a"], "it is in use"
    await later.aclose()


@pytest.mark.parametrize("model", ["m", None])
async def test_what_left_with_its_model_or_engine_is_forgotten(
    desk: Desk, model: str | None
) -> None:
    await desk.used(C, "other")
    held = await desk.held(A)
    dropping = asyncio.create_task(desk.adapters.drop("m", "a"))
    await turns()
    desk.adapters.forget(model)
    await turns()
    assert dropping.done()
    assert desk.names == []
    assert desk.adapters.loaded_for("other") == ([("c", 0, LOADED)] if model else [])
    await desk.used(A)
    await held.aclose()
    assert desk.adapters.loaded_for("m") == [("a", 0, LOADED)], "the old lease was another's"
    assert desk.engine.log.count("load m a") == 2


async def test_a_lost_engine_can_unload_nothing(desk: Desk) -> None:
    await desk.used(A)
    desk.engine.failure = EngineDied("The engine process died.")
    desk.adapters.shrink(0)
    await turns()
    assert desk.engine.log == ["load m a", "unload m a"]


# An adapter is found by its name, or by a path that the owner allows.


SAMPLES = Path(__file__).parents[2] / "adapters"


class Known(AdapterCatalog):
    """Finds every adapter that it is given."""

    def __init__(self, **places: AdapterLocation) -> None:
        super().__init__(BaseModelShapes(), places)

    def read(self, name: str, place: AdapterLocation) -> AdapterSpec:
        return AdapterSpec(name, place.path, name, 8, FILE, "lora", None, "mlx")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("allowed/one", "allowed/two", "allowed-not/three"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "allowed/out").symlink_to(tmp_path / "allowed-not/three")
    (tmp_path / "in").symlink_to(tmp_path / "allowed/one")
    return tmp_path


@pytest.mark.parametrize(
    "outside",
    ["allowed/../allowed-not/three", "allowed/out", "allowed-not/three", "", "allowed/.."],
)
def test_a_folder_elsewhere_is_none(folders: Path, outside: str) -> None:
    with pytest.raises(AdapterNotFound) as refused:
        allowed_folder(str(folders / outside), [folders / "allowed"])
    assert str(folders / "allowed-not") not in str(refused.value).replace(
        str(folders / outside), ""
    )


@pytest.mark.parametrize("path", ["allowed/one", "./allowed/one", "allowed/two/../one"])
def test_a_path_may_be_relative_to_the_folder_of_models_yaml(folders: Path, path: str) -> None:
    """It names `allowed` there, while the server was started elsewhere."""
    assert allowed_folder(path, [folders / "allowed"]) == (folders / "allowed/one").resolve()
    for outside in ("allowed-not/three", "allowed/out", "one"):
        with pytest.raises(AdapterNotFound):
            allowed_folder(outside, [folders / "allowed"])


@pytest.mark.parametrize("odd", ["/a\0b", "/" + "a" * 5000, "~root/x", "/proc/self/root/etc/x"])
def test_what_is_no_path_is_no_adapter(folders: Path, odd: str) -> None:
    with pytest.raises(AdapterNotFound):
        find_adapter(Known(), odd, [folders / "allowed"])


def test_a_name_is_a_name_and_a_path_is_the_adapter_that_lies_there(folders: Path) -> None:
    one = folders / "allowed/one"
    catalog = Known(mine=AdapterLocation(one, by_client=True))
    assert find_adapter(catalog, "mine", []).by_client
    found = find_adapter(catalog, str(folders / "in"), [folders / "allowed"])
    assert (found.spec.name, found.by_client) == ("mine", True), "by whatever way"
    new = find_adapter(catalog, str(folders / "allowed/two"), [folders / "allowed"])
    assert (new.spec.name, new.by_client) == ("two", False)


def test_a_folder_does_not_take_the_name_of_another(folders: Path) -> None:
    catalog = Known(two=AdapterLocation(folders / "allowed/one", by_client=True))
    found = find_adapter(catalog, str(folders / "allowed/two"), [folders / "allowed"])
    assert found.spec.path == folders.resolve() / "allowed/two"
    assert catalog.locations()["two"] == AdapterLocation(folders / "allowed/one", by_client=True)


def test_a_list_of_models_reads_each_adapter_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are hashed to be known; a client that asks again and again must not repeat that."""
    shutil.copytree(SAMPLES / "pirate", tmp_path / "adapters" / "pirate")
    read: list[Path] = []
    own = read_adapter

    def counted(folder: Path, **more: Any) -> AdapterSpec:
        read.append(folder)
        return own(folder, **more)

    monkeypatch.setattr(catalog_module, "read_adapter", counted)
    pool = Pool([ModelSpec("m", "demo:smollm2", adapters_dir=tmp_path / "adapters")])

    async def names() -> list[list[str]]:
        return [await pool.adapter_names("m") for _ in range(3)]

    assert asyncio.run(names()) == [["pirate"]] * 3
    assert len(read) == 1


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """One adapter, for any base."""
    shutil.copytree(Path(__file__).parents[2] / "adapters" / "pirate", tmp_path / "pirate")
    config = tmp_path / "pirate" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"model": None}))
    return tmp_path


async def test_an_adapter_that_was_unloaded_while_its_request_waited_is_not_loaded_again(
    a: ModelSpec, samples: Path
) -> None:
    limits = replace(TWO, budget=10**9)

    async with running(a, limits=limits, adapter_dirs=[samples]) as (pool, machine):
        await pool.add_adapter("a", "new", str(samples / "pirate"))
        prepared = await pool.prepared("a")
        adapter = await pool.adapter(prepared, "new")
        async with pool.lease(prepared, asks(0), adapter):
            pass
        await pool.remove_adapter("a", "new")
        with pytest.raises(AdapterNotFound):
            async with pool.lease(prepared, asks(0), adapter):
                raise AssertionError
        await turns()
        assert pool.engines[0].scheduler.adapters.loaded_for("a") == []
        loaded = f"load a {adapter.spec.digest}"
        assert machine.log == ["load a", loaded, f"un{loaded}"]
        for remove in ("new", "nobody"):
            with pytest.raises(AdapterNotFound):
                await pool.remove_adapter("a", remove)


async def test_clients_load_so_many_adapters_and_no_more(
    a: ModelSpec, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "ADDED_ADAPTERS", 2)

    async with running(a, adapter_dirs=[samples]) as (pool, _):
        for name in ("one", "two", "one"):
            await pool.add_adapter("a", name, str(samples / "pirate"))
        with pytest.raises(BadRequest, match="Clients have loaded 2 adapters"):
            await pool.add_adapter("a", "three", str(samples / "pirate"))
        await pool.remove_adapter("a", "two")
        await pool.add_adapter("a", "three", str(samples / "pirate"))
