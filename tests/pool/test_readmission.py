"""Requests whose engine is lost: who goes on, in which order, and who does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.engine.messages import Embed, Generate, Picture
from mlx_server.errors import EngineDied, ModelSuspended, RequestEndsEngine
from mlx_server.pool import readmission
from mlx_server.pool.readmission import Attempts, Readmission, fingerprint
from mlx_server.requests import SamplingParams
from tests.engine.clients import asynchronous


class Engines:
    """One engine after the other. Requests are in the present one until it ends."""

    def __init__(self) -> None:
        self.readmission = Readmission(self._running)
        self.lost = asyncio.Event()
        self.present: Any = object()
        self.began: list[str] = []
        self.let_go = asyncio.Event()

    async def _running(self) -> Any:
        return self.present

    def end(self) -> None:
        self.present = object()
        self.lost.set()
        self.lost = asyncio.Event()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Any]:
        yield self

    async def ask(
        self,
        name: str,
        *,
        model: str = "m",
        answers: bool = True,
        seconds: float = 0.0,
        ends: bool = False,
    ) -> int:
        """A request that has its first token after some seconds, or never; returns how often it
        began. ends: whether it ends its engine."""
        attempts, times = Attempts(model, lambda: name), 0
        while not attempts.is_done:
            async with self.readmission.visit(attempts, self.lease):
                times += 1
                self.began.append(name)
                attempts.was_sent = True
                if ends:
                    asyncio.get_running_loop().call_soon(self.end)
                if answers and not seconds:
                    self.readmission.answered(attempts)
                lost = asyncio.create_task(self.lost.wait())
                done = asyncio.create_task(self.let_go.wait())
                if seconds:
                    await asyncio.wait({lost}, timeout=seconds)
                    if not lost.done():
                        self.readmission.answered(attempts)
                try:
                    await asyncio.wait({lost, done}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    ended = lost.done()
                    lost.cancel()
                    done.cancel()
                if ended:
                    raise EngineDied("It died.")
        return times

    def begin(self, *names: str, **how: Any) -> list[asyncio.Task[int]]:
        return [asyncio.create_task(self.ask(name, **how)) for name in names]


async def turns() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


@asynchronous
async def test_all_go_on_in_their_order() -> None:
    engines = Engines()
    tasks = engines.begin("a", "b", "c")
    await turns()
    engines.end()
    await turns()
    assert engines.began == ["a", "b", "c", "a", "b", "c"]
    engines.let_go.set()
    assert await asyncio.gather(*tasks) == [2, 2, 2]
    assert engines.readmission.resumed == 3


@asynchronous
async def test_they_take_turns_until_each_has_a_token_and_others_wait() -> None:
    engines = Engines()
    slow = engines.begin("slow", answers=False)
    tasks = engines.begin("a", "b")
    await turns()
    engines.end()
    await turns()
    tasks += engines.begin("new")
    await turns()
    assert engines.began[3:] == ["a", "b", "slow"], "who may have ended it comes last"
    slow[0].cancel()
    await turns()
    assert engines.began[6:] == ["new"]
    engines.let_go.set()
    assert await asyncio.gather(*tasks) == [2, 2, 1]


@asynchronous
async def test_a_turn_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readmission, "LONGEST_TURN", 0.0)
    engines = Engines()
    tasks = engines.begin("slow", "a", answers=False)
    await turns()
    engines.end()
    await asyncio.sleep(0.01)
    assert engines.began[2:] == ["slow", "a"]
    engines.let_go.set()
    assert await asyncio.gather(*tasks) == [2, 2]


@asynchronous
async def test_who_ends_two_engines_alone_fails_alone_and_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines()
    (fatal,) = engines.begin("fatal", answers=False)
    others = engines.begin("a", "b")
    for _ in range(2):
        await turns()
        engines.end()
    await turns()
    with pytest.raises(RequestEndsEngine):
        await fatal
    with pytest.raises(RequestEndsEngine):
        await engines.ask("fatal")
    monkeypatch.setattr(limits, "FATAL_REQUESTS", 1)
    (another,) = engines.begin("another", answers=False)
    for _ in range(2):
        await turns()
        engines.end()
    with pytest.raises(RequestEndsEngine):
        await another
    engines.let_go.set()
    assert await engines.ask("fatal") == 1, "only so many are kept"
    assert await asyncio.gather(*others) == [5, 5]
    assert await engines.ask("c") == 1


@asynchronous
async def test_who_ends_engines_is_found_next_to_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readmission, "LONGEST_TURN", 0.01)
    engines = Engines()
    others = engines.begin("quick") + engines.begin("a", "b", seconds=0.05)
    (fatal,) = engines.begin("fatal", answers=False, ends=True)
    with pytest.raises(RequestEndsEngine):
        await fatal
    engines.let_go.set()
    await asyncio.gather(*others)


@asynchronous
async def test_a_request_that_went_on_is_not_to_blame() -> None:
    engines = Engines()
    (one,) = engines.begin("a")
    for _ in range(5):
        await turns()
        engines.end()
    engines.let_go.set()
    assert await one == 6


@asynchronous
async def test_a_model_that_ends_engines_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(readmission, "now", lambda: now[0])
    engines = Engines()
    tasks = engines.begin("a", "b", answers=False)  # neither is alone, so nobody is to blame
    monkeypatch.setattr(limits, "REQUEST_DEATHS", 10)
    for _ in range(limits.MODEL_DEATHS):
        await turns()
        engines.end()
    await turns()
    for task in tasks:
        with pytest.raises(ModelSuspended) as caught:
            await task
        assert caught.value.headers["Retry-After"] == "60"
    engines.let_go.set()
    assert await engines.ask("c", model="other") == 1
    now[0] += readmission.MINUTE
    assert await engines.ask("d") == 1


def test_the_fingerprint_is_of_what_is_asked() -> None:
    def row(**fields: Any) -> Generate:
        given = {"prompt": [1, 2], "max_tokens": 5, **fields}
        return Generate(
            row=given.pop("row", 0), model="m", stop_tokens=[], sampling=SamplingParams(), **given
        )

    same: list[Generate] = [
        row(),
        row(row=7),
        row(own_seed=3),
        row(generated=[4]),
        row(client="x"),
    ]
    assert len({fingerprint([each]) for each in same}) == 1
    others = [row(prompt=[1]), row(max_tokens=6), row(prompt=[1, 2, 3]), row()]
    both = [*map(fingerprint, ([each] for each in others)), fingerprint([Embed(1, "m", [[1, 2]])])]
    assert len({*both}) == 5


def test_a_fingerprint_is_made_once_and_reads_no_pixels() -> None:
    def row(pixels: bytes) -> Generate:
        shown = Picture(1, b"d" * 32, 1, [(28, 28)], pixels)
        return Generate(1, "m", [3, 4, 5], 8, [], SamplingParams(), pictures=[shown])

    assert fingerprint([row(b"abc")]) == fingerprint([row(b"")])
    made = count()
    attempts = Attempts("m", lambda: str(next(made)))
    assert attempts.fingerprint() == attempts.fingerprint() == "0"
