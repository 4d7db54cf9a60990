"""What the loop stands on, as far as a test needs it: a pool whose engine plays the transcript, and
servers that are reached by HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from mlx_server import limits
from mlx_server.engine.client import Item, RowStream
from mlx_server.engine.messages import FIRST_MEDIA_ID, Admitted, Generate, Prefilled, Token
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from tests.engine.stub import StubEngine

MODEL = "m"


@contextmanager
def lowered(**values: float) -> Iterator[None]:
    """Limits with other values, by their names."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in values.items():
            patched.setattr(limits, name, value)
        yield


CACHED = 3
"""Tokens that the engine says it knew of each prompt."""


class Playing(StubEngine):
    """Says the scripts of replay models, all at once; any other model says the outputs in turn."""

    def __init__(self, outputs: Sequence[str] = ()) -> None:
        super().__init__(2**20)
        self._outputs = iter(outputs)
        self.prompts: list[str] = []
        self.rows: list[Generate] = []

    def read(self, path: str) -> None:
        self.tokenizer = Tokenizer(Path(path) / "tokenizer.json")

    @asynccontextmanager
    async def generate(self, rows: Sequence[Generate]) -> AsyncIterator[RowStream]:
        answers = RowStream()
        for row in rows:
            self.add(row, answers)
        yield answers

    def add(self, row: Generate, answers: RowStream) -> None:
        row.row = len(self.rows)
        if row.forced_tokens is None:
            row.forced_tokens = [*self.tokenizer.encode(next(self._outputs)), row.stop_tokens[0]]
        self.rows.append(row)
        self.prompts.append(self.tokenizer.raw([id for id in row.prompt if id < FIRST_MEDIA_ID]))
        for item in _played(row):
            answers.put(item)

    def cancel(self, rows: Sequence[int]) -> None: ...


def _played(row: Generate) -> Iterator[Item]:
    assert row.forced_tokens
    yield Admitted(row.row)
    yield Prefilled(row.row, CACHED)
    for place, id in enumerate(row.forced_tokens, start=1):
        if id in row.stop_tokens:
            yield Token(row.row, id, "stop")
            return
        cut = place == row.max_tokens
        yield Token(row.row, id, "length" if cut else None)
        if cut:
            return


@asynccontextmanager
async def playing(
    folder: Path, family: str, *outputs: str, source: str = "", **spec: Any
) -> AsyncIterator[tuple[Pool, Playing]]:
    """The outputs come one after the other, for any client."""
    transcript = folder / "said.jsonl"
    lines = (json.dumps({"output": output}) for output in outputs)
    transcript.write_text("\n".join(lines), "utf-8")
    engine = Playing(outputs)
    pool = Pool([ModelSpec(MODEL, source or f"replay:{transcript}", family=family, **spec)])
    pool.make_engine = lambda **limits: engine
    await pool.start()
    try:
        yield pool, engine
    finally:
        await pool.stop()


class Server(uvicorn.Server):
    """Leaves signals alone, and tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@asynccontextmanager
async def served(app: Any, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """The address of an ASGI app that is served here."""
    config = uvicorn.Config(app, host=host, port=0, log_config=None, timeout_graceful_shutdown=1)
    server = Server(config)
    running = asyncio.create_task(server._serve())
    await server.ready.wait()
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await running


async def all_gone(seconds: float = 20.0) -> None:
    """Every connection has ended by itself, with all that it held."""
    async with asyncio.timeout(seconds):
        while held := [task for task in asyncio.all_tasks() if "Session._hold" in repr(task)]:
            await asyncio.wait(held)
