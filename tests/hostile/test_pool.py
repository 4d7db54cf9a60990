"""Adapters come and go in any order, with an engine that answers late, and no byte is lost.

What of models is here is the policy's, which has a machine of its own: see tests/pool.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import (
    AdapterLoaded,
    Command,
    CommandFailed,
    LoadAdapter,
    Report,
    UnloadAdapter,
    Unloaded,
)
from mlx_server.errors import ServerError
from mlx_server.models.adapter_reader import AdapterSpec
from mlx_server.pool.adapters import AdapterPool, LeasedAdapter

FILE, WIDE = 10, 14
"""Bytes of an adapter, in its file and in memory."""

EVENTS = (*("ask",) * 3, *("answer",) * 3, "fail", *("leave",) * 2, "room", "drop")


class Engine(EngineClient):
    """The real client; what it sends is done, in order, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[Command] = []
        self.there: set[str] = set()

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def answer(self, *, works: bool) -> None:
        match self.commands.pop(0) if self.commands else None:
            case LoadAdapter(model, adapter):
                self._dispatch(self._loaded(model, adapter, works))
            case UnloadAdapter(model, adapter):
                self.there.discard(adapter)
                self._dispatch(Unloaded(model, adapter))

    def _loaded(self, model: str, adapter: str, works: bool) -> Report:
        if adapter in self.there or works:
            self.there.add(adapter)
            return AdapterLoaded(model, adapter, WIDE)
        return CommandFailed("LoadAdapter", model, "no room", adapter)


@dataclass
class Desk:
    engine: Engine = field(default_factory=Engine)
    changes: int = 0
    inside: dict[asyncio.Task[None], str] = field(default_factory=dict)
    asked: list[asyncio.Task[None]] = field(default_factory=list)
    drops: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.adapters = AdapterPool(lambda: self.engine, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    async def row(self, adapter: LeasedAdapter) -> None:
        task = asyncio.current_task()
        assert task
        with suppress(ServerError):
            async with self.adapters.lease("m", adapter):
                self.inside[task] = adapter.spec.digest
                try:
                    await asyncio.Event().wait()
                finally:
                    del self.inside[task]

    async def happen(self, event: str, pick: int) -> None:
        note(f"{event} {pick}")
        match event:
            case "ask":
                self.asked.append(asyncio.create_task(self.row(ADAPTERS[pick % len(ADAPTERS)])))
            case "answer" | "fail":
                self.engine.answer(works=event == "answer")
            case "leave" if self.asked:
                self.asked.pop(pick % len(self.asked)).cancel()
            case "room":
                self.adapters.shrink(pick % 4 * FILE)
            case "drop":
                self.drops.append(asyncio.create_task(self.adapters.drop("m", "abc"[pick % 3])))
        if pick % 2:  # or the next one comes before anybody has taken note
            await self.settled()

    async def settled(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)
        for digest in self.inside.values():
            assert digest in self.engine.there
            assert UnloadAdapter("m", digest) not in self.engine.commands, "it is in use"

    async def end(self) -> None:
        """When all have left and the engine has done everything, both know of the same bytes."""
        for task in self.asked:
            task.cancel()
        for _ in range(100):
            await self.settled()
            self.engine.answer(works=True)
        assert not self.engine.commands
        assert len(asyncio.all_tasks()) == 1, "nobody waits any more"
        assert all(leases == 0 for _, leases, _ in self.adapters.loaded_for("m"))
        idle, stays = self.adapters.idle_bytes, self.adapters.unreserved_bytes("m")
        assert idle + stays == WIDE * len(self.engine.there)
        self.adapters.shrink(0)
        await self.settled()
        for _ in ADAPTERS:
            self.engine.answer(works=True)
        assert not self.engine.there


def adapter_of(name: str) -> LeasedAdapter:
    spec = AdapterSpec(name, Path(name), name, 8, FILE, "lora", None, "mlx")
    return LeasedAdapter(spec)


ADAPTERS = [adapter_of(name) for name in "abc"]


@given(st.binary(min_size=40, max_size=120))
@settings(max_examples=150, database=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_adapter_is_lost_or_taken_from_its_rows(events: bytes) -> None:
    async def test() -> None:
        desk = Desk()
        for what, pick in zip(events[::2], events[1::2], strict=False):
            await desk.happen(EVENTS[what % len(EVENTS)], pick)
        await desk.end()

    asyncio.run(test())
