"""Loading once, waiting, refusing. The engine here is a few lines that load what they are told."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_server.engine.client import EngineClient, OnLoading
from mlx_server.engine.messages import Loaded
from mlx_server.errors import (
    BadRequest,
    ModelNotFound,
    ModelUnusable,
    Overloaded,
    ServerError,
    SettingsError,
    ShuttingDown,
)
from mlx_server.families.plain import PLAIN
from mlx_server.pool.pool import Model, ModelSpec, OnProgress, Pool
from tests.families import byte_level, write_checkpoint


class Engine:
    """Loads when `open` is set; raises `failures` one by one before that."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.asked = asyncio.Event()
        self.open = asyncio.Event()
        self.failures: list[Exception] = []
        self.ended_with: list[ServerError | None] = []

    async def start(self) -> None: ...

    async def stop(self, error: ServerError | None = None) -> None:
        self.ended_with.append(error)

    async def load(self, model: str, path: str, progress: OnLoading) -> Loaded:
        self.loads.append(model)
        self.asked.set()
        await self.open.wait()
        if self.failures:
            raise self.failures.pop(0)
        progress(5, 10)
        return Loaded(model, vocabulary=500, nbytes=3 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(
        tmp_path_factory.mktemp("model"),
        byte_level(),
        config={"model_type": "tiny", "max_position_embeddings": 100},
    )
    (path / "model.safetensors").touch()
    return path


@pytest.fixture
def spec(folder: Path) -> ModelSpec:
    return ModelSpec("m", str(folder), aliases=("gpt-4", "default"))


def pooled(
    *specs: ModelSpec,
    concurrency: int = 16,
    queue: int = 64,
    on_progress: OnProgress = lambda *progress: None,
) -> tuple[Pool, Engine]:
    pool = Pool(specs, concurrency=concurrency, queue=queue, on_progress=on_progress)
    engine = Engine()
    pool.engine = cast(EngineClient, engine)
    return pool, engine


async def held(pool: Pool, name: str = "m", rows: int = 1) -> Model:
    async with pool.acquire(name, rows) as model:
        return model


async def fails_inside(pool: Pool) -> None:
    async with pool.acquire("m", 2):
        assert pool.rows == 2
        raise ZeroDivisionError


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_model_is_loaded_once_for_all_who_want_it(spec: ModelSpec) -> None:
    async def test() -> None:
        pool, engine = pooled(spec)
        assert pool.state("m") == "unloaded"
        waiting = [asyncio.create_task(held(pool)) for _ in range(20)]
        await engine.asked.wait()
        assert (pool.state("m"), pool.rows, pool.loaded) == ("loading", 20, [])
        engine.open.set()
        models = await asyncio.gather(*waiting)
        models.append(await held(pool, "gpt-4"))
        assert engine.loads == ["m"]
        assert all(model is models[0] for model in models)
        assert (pool.state("m"), pool.rows, pool.loaded) == ("ready", 0, [models[0]])

    run(test)


def test_a_model_is_what_its_files_and_its_owner_say(spec: ModelSpec) -> None:
    async def test() -> None:
        owned = replace(
            spec, id="o", aliases=(), family="smollm2", chat_template="mine", context_length=50
        )
        pool, engine = pooled(spec, owned)
        engine.open.set()
        plain, mine = await held(pool, "m"), await held(pool, "o")
        assert (plain.id, plain.spec, plain.vocabulary, plain.nbytes) == ("m", spec, 500, 3 << 20)
        assert (plain.family, plain.context_length) == (PLAIN, 100)
        assert plain.checkpoint.template is None
        assert (mine.family.name, mine.context_length) == ("smollm2", 50)
        assert mine.checkpoint.template
        assert mine.checkpoint.template.source == "mine"
        assert engine.loads == ["m", "o"]

    run(test)


def test_a_failed_load_is_told_to_all_who_wait_and_tried_again(spec: ModelSpec) -> None:
    async def test() -> None:
        pool, engine = pooled(spec)
        engine.failures.append(ModelUnusable("No room."))
        waiting = [asyncio.create_task(held(pool)) for _ in range(5)]
        await engine.asked.wait()
        engine.open.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(result) for result in results] == ["No room."] * 5
        assert all(isinstance(result, ModelUnusable) for result in results)
        assert (pool.state("m"), pool.rows, pool.loaded) == ("failed", 0, [])
        assert (await held(pool)).id == "m"
        assert engine.loads == ["m", "m"]

    run(test)


def test_files_that_are_repaired_are_read_again(tmp_path: Path) -> None:
    async def test() -> None:
        write_checkpoint(tmp_path, byte_level())
        pool, engine = pooled(ModelSpec("m", str(tmp_path)))
        engine.open.set()
        with pytest.raises(ModelUnusable, match="safetensors"):
            await held(pool)
        (tmp_path / "model.safetensors").touch()
        assert (await held(pool)).id == "m"

    run(test)


def test_an_unknown_family_is_told_before_anything_is_loaded(spec: ModelSpec) -> None:
    async def test() -> None:
        pool, engine = pooled(replace(spec, family="llama"))
        with pytest.raises(SettingsError, match="Known families"):
            await held(pool)
        assert engine.loads == []

    run(test)


def test_whoever_stops_waiting_does_not_stop_the_load(spec: ModelSpec) -> None:
    async def test() -> None:
        pool, engine = pooled(spec)
        impatient, patient = (asyncio.create_task(held(pool)) for _ in range(2))
        await engine.asked.wait()
        impatient.cancel()
        await asyncio.wait([impatient])
        assert impatient.cancelled()
        assert (pool.state("m"), pool.rows) == ("loading", 1)
        engine.open.set()
        assert (await patient).id == "m"
        assert engine.loads == ["m"]

    run(test)


@pytest.mark.parametrize("name", ["m", "gpt-4", "default"])
def test_a_model_has_several_names(spec: ModelSpec, name: str) -> None:
    pool = Pool([spec, replace(spec, id="n", aliases=("other",))])
    assert pool.spec(name) is spec
    assert pool.spec("other").id == "n"


@pytest.mark.parametrize("name", ["", "M", "gpt", "m ", "x" * 10_000])
def test_an_unknown_model_is_told_what_there_is(spec: ModelSpec, name: str) -> None:
    async def test() -> None:
        pool, engine = pooled(spec, replace(spec, id="n", aliases=()))
        with pytest.raises(ModelNotFound, match=r"Served: m, n\.") as caught:
            await held(pool, name)
        assert caught.value.param == "model"
        assert len(caught.value.message) < 400
        assert (engine.loads, pool.rows) == ([], 0)

    run(test)


def test_where_nothing_is_served_that_is_said() -> None:
    with pytest.raises(ModelNotFound, match="Served: none"):
        Pool([]).spec("m")


def test_a_full_queue_refuses_and_a_place_that_is_left_is_taken(spec: ModelSpec) -> None:
    async def test() -> None:
        pool, engine = pooled(spec, concurrency=2, queue=3)
        engine.open.set()
        async with AsyncExitStack() as stack:
            for rows in (1, 3):
                await stack.enter_async_context(pool.acquire("m", rows))
            assert pool.rows == 4
            with pytest.raises(Overloaded, match="4 answers"):
                await held(pool, rows=2)
            assert pool.rows == 4
            await held(pool, rows=1)
        assert pool.rows == 0
        await held(pool, rows=5)

    run(test)


def test_more_rows_than_can_ever_fit_are_no_matter_of_waiting(spec: ModelSpec) -> None:
    async def test() -> None:
        pool, engine = pooled(spec, concurrency=2, queue=3)
        with pytest.raises(BadRequest, match="at most 5 answers here, not 6"):
            await held(pool, rows=6)
        assert (engine.loads, pool.rows) == ([], 0)

    run(test)


def test_places_are_given_back_whatever_happens(spec: ModelSpec) -> None:
    async def test() -> None:
        pool, engine = pooled(spec)
        engine.failures.append(ModelUnusable("No room."))
        waiting = asyncio.create_task(held(pool, rows=7))
        await engine.asked.wait()
        assert pool.rows == 7
        waiting.cancel()
        await asyncio.wait([waiting])
        assert pool.rows == 0

        engine.open.set()
        with pytest.raises(ModelUnusable):
            await held(pool, rows=3)
        assert pool.rows == 0

        with pytest.raises(ZeroDivisionError):
            await fails_inside(pool)
        assert pool.rows == 0

    run(test)


def test_stopping_ends_loads_with_a_word_to_all_who_wait(spec: ModelSpec) -> None:
    async def test() -> None:
        pool, engine = pooled(spec)
        waiting = [asyncio.create_task(held(pool)) for _ in range(3)]
        await engine.asked.wait()
        error = ShuttingDown("The server is shutting down.")
        await pool.stop(error)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [ShuttingDown] * 3
        assert engine.ended_with == [error]
        assert (pool.rows, pool.loaded) == (0, [])

    run(test)


def test_stopping_twice_is_stopping(spec: ModelSpec) -> None:
    async def test() -> None:
        pool, engine = pooled(spec)
        engine.open.set()
        await held(pool)
        await pool.stop()
        await pool.stop()
        assert engine.ended_with == [None, None]

    run(test)


def test_preloading_begins_at_the_start_and_only_where_asked_for(spec: ModelSpec) -> None:
    async def test() -> None:
        pool, engine = pooled(spec, replace(spec, id="p", aliases=(), preload=True))
        await pool.start()
        await engine.asked.wait()
        assert (pool.state("p"), pool.state("m")) == ("loading", "unloaded")
        engine.open.set()
        assert (await held(pool, "p")).id == "p"
        assert engine.loads == ["p"]

    run(test)


@pytest.mark.parametrize("error", [ModelUnusable("No room."), OSError("No room.")])
def test_a_preload_that_fails_is_logged(
    spec: ModelSpec, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def test() -> None:
        pool, engine = pooled(replace(spec, preload=True))
        engine.failures.append(error)
        await pool.start()
        await engine.asked.wait()
        joined = asyncio.create_task(held(pool))
        engine.open.set()
        await asyncio.wait([joined])
        assert (pool.state("m"), engine.loads) == ("failed", ["m"])

    with caplog.at_level(logging.ERROR):
        run(test)
    assert "No room." in caplog.text


def test_progress_is_told_by_model(spec: ModelSpec) -> None:
    async def test() -> None:
        seen: list[tuple[str, str, int, int]] = []
        pool, engine = pooled(spec, on_progress=lambda *progress: seen.append(progress))
        engine.open.set()
        await held(pool)
        assert seen == [("m", "loading", 5, 10)]

    run(test)
