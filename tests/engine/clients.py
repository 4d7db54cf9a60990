"""Engine clients of a test: started, asked and stopped."""

import asyncio
import functools
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec

from mlx_server.engine.client import EngineClient, RowStream
from mlx_server.engine.messages import Generate, LoadModel, Token
from mlx_server.engine.worker_arguments import WorkerArguments
from mlx_server.requests import SamplingParams
from tests.worker.batch_runs import a_prompt
from tests.worker.engine_runs import grammar_of

P = ParamSpec("P")

HANG = 120.0
"""Seconds after which whatever is still waiting waits for ever."""

ENDLESS = 1_000_000


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), HANG))

    return run


@asynccontextmanager
async def running(path: Path | None = None, *, cache_bytes: int = 0) -> AsyncIterator[EngineClient]:
    """An engine process, with the model "tiny" loaded if there is a path to one."""
    engine = EngineClient(WorkerArguments(concurrency=4, cache_bytes=cache_bytes))
    await engine.start()
    try:
        if path:
            await engine.load(LoadModel("tiny", str(path)), ignored)
        yield engine
    finally:
        await engine.stop()


def ignored(done: int, total: int) -> None: ...


def ask(
    tokens: int = 5,
    *,
    model: str = "tiny",
    prompt: int = 6,
    grammar: str | None = None,
    **rest: Any,
) -> Generate:
    fields: dict[str, Any] = {"stop_tokens": [], "sampling": SamplingParams(temperature=0), **rest}
    fields["grammar"] = grammar_of(grammar)
    return Generate(row=-1, model=model, prompt=a_prompt(prompt), max_tokens=tokens, **fields)


async def answered(engine: EngineClient, *rows: Generate) -> list[list[Token]]:
    """Each row's tokens, when all have ended."""
    answers: dict[int, list[Token]] = {}
    async with engine.generate(rows) as feed:
        ended = 0
        while ended < len(rows):
            for item in await feed.take():
                if isinstance(item, Token):
                    answers.setdefault(item.row, []).append(item)
                    ended += item.finish is not None
    return [answers[row.row] for row in rows]


async def until_it_fails(engine: EngineClient, *rows: Generate) -> None:
    async with engine.generate(rows) as feed:
        while True:
            await feed.take()


async def first_token(feed: RowStream) -> None:
    while not any(isinstance(item, Token) for item in await feed.take()):
        pass


def freeze(engine: EngineClient) -> int:
    """The engine process stops where it is, until it is killed."""
    assert engine.pid
    os.kill(engine.pid, signal.SIGSTOP)
    return engine.pid
