"""Measures servers on a simulated Mac by the wall clock, as their clients see them."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from time import perf_counter

from bench_parts.contenders import answering, fast
from bench_parts.models import model_folder
from bench_parts.tables import Row
from mlx_server.clients.bench import Exchange, Target, Workload
from mlx_server.errors import GenerationFailed

NOTE = (
    "Simulated: each forward pass takes the time that a formula gives for that model on that "
    "machine (see scripts/bench_parts/simulated/roofline.py). No Mac was measured."
)

SITE = Path(__file__).parent / "site"
LONG, PROMPT, COUNT = 30_000, 2_000, 8
STREAMED_SECONDS = 3.0
"""Seconds that a row streams alone before the long prompt arrives."""
ENDLESS = 100_000


@dataclass(frozen=True)
class Measured:
    """One server on one simulated machine and model."""

    pair: str
    server: str
    alone: float
    """Seconds to a long prompt's first token, with no other row."""
    next_to_stream: float
    """Seconds to that prompt's first token next to a stream."""
    gap: float
    """The stream's longest pause while the prompt is computed, in seconds."""
    speed: float
    """The stream's speed while the prompt is computed, as a share of its speed alone."""
    first_of_8: tuple[float, float]
    """Mean seconds to the first token of eight prompts, with short and with long answers."""
    all_of_8: tuple[float, float]
    """Seconds until all eight are done, with short and with long answers."""


@dataclass(frozen=True)
class Crowd:
    """Prompts that arrive at the same time."""

    began: float
    ended: float
    """The time of each prompt's last token, by perf_counter."""
    first_token: float
    """Mean seconds to the first token."""

    @property
    def done(self) -> float:
        """Seconds until all prompts are answered."""
        return self.ended - self.began


def measured(pair: str, server: str, own: Path | None) -> Measured:
    with SERVERS[server](pair, own) as target:
        return asyncio.run(_scenarios(pair, server, target))


async def _scenarios(pair: str, server: str, target: Target) -> Measured:
    await ask(target, 20, 4)
    began, times = await ask(target, LONG, 4)
    alone = times[0] - began
    next_to_stream, gap, speed = await _next_to_stream(target)
    short, long = [await crowd(target, COUNT, PROMPT, tokens) for tokens in (32, 256)]
    firsts, ends = (short.first_token, long.first_token), (short.done, long.done)
    return Measured(pair, server, alone, next_to_stream, gap, speed, firsts, ends)


async def _next_to_stream(target: Target) -> tuple[float, float, float]:
    async with streaming(target, 300) as stream:
        began, times = await ask(target, LONG, 4)
    tokens = stream.times()
    own = [b - a for a, b in pairwise(tokens) if began - STREAMED_SECONDS < a and b < began]
    meanwhile = [b - a for a, b in pairwise(tokens) if a >= began - own[-1] and b <= times[0]]
    meanwhile.append(times[0] - max(time for time in tokens if time <= times[0]))
    return times[0] - began, max(meanwhile), mean(own) / mean(meanwhile)


@asynccontextmanager
async def streaming(target: Target, words: int) -> AsyncIterator[Exchange]:
    """Yields a stream that has run alone for a while, and continues until the block is left."""
    stream = _exchange(target, words, ENDLESS)
    running = asyncio.create_task(stream.run())
    await asyncio.sleep(2 * STREAMED_SECONDS)
    try:
        yield stream
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def crowd(target: Target, count: int, words: int, tokens: int) -> Crowd:
    """words: the words of each prompt. tokens: the tokens of each answer."""
    began = perf_counter()
    found = await asyncio.gather(*(ask(target, words, tokens) for _ in range(count)))
    ended = perf_counter()
    return Crowd(began, ended, mean(times[0] - asked for asked, times in found))


async def ask(target: Target, words: int, tokens: int) -> tuple[float, list[float]]:
    """Returns when the request was sent, and when each text arrived."""
    exchange = _exchange(target, words, tokens)
    began = perf_counter()
    await exchange.run()
    times = exchange.times()
    if not times:
        exchange.answer()  # raises an error if there is one
        raise GenerationFailed("The answer has no text.")
    return began, times


def _exchange(target: Target, words: int, tokens: int) -> Exchange:
    return Exchange(
        target, Workload(1, 1, words, tokens, seed=os.urandom(8).hex()).prompt(0), tokens
    )


def _variables(pair: str, own: Path | None) -> Mapping[str, str]:
    places = [str(SITE), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    file = {"MLX_SIMULATED_FILE": str(own.resolve())} if own else {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, places)), "MLX_SIMULATED": pair, **file}


@contextmanager
def _ours(pair: str, own: Path | None) -> Iterator[Target]:
    folder = model_folder("simulated")
    command = ["mlx_server", "serve", str(folder), "--log-level", "error"]
    with answering(command, folder.name, folder, _variables(pair, own)) as (_, target):
        yield target


@contextmanager
def _mlx_lm(pair: str, own: Path | None) -> Iterator[Target]:
    folder = model_folder("simulated")
    command = ["mlx_lm.server", "--model", str(folder), "--log-level", "ERROR"]
    variables = {**_variables(pair, own), **fast()}
    with answering(command, "default_model", folder, variables) as (_, target):
        yield target


SERVERS: dict[str, Callable[[str, Path | None], AbstractContextManager[Target]]] = {
    "mlx-server": _ours,
    "mlx_lm.server": _mlx_lm,
}

COLUMNS = (
    "machine, model",
    "server",
    "30k prompt: first token, s",
    "next to a stream",
    "the stream's longest gap",
    "its speed",
    "8 x 2k: mean first token (answers of 32 / 256)",
    "all done",
)


def rows(found: list[Measured]) -> Iterator[Row]:
    for each in found:
        yield (
            each.pair.replace(":", ", "),
            each.server,
            f"{each.alone:.1f}",
            f"{each.next_to_stream:.1f}",
            f"{each.gap:.2f}",
            f"{each.speed:.2f}",
            " / ".join(f"{seconds:.1f}" for seconds in each.first_of_8),
            " / ".join(f"{seconds:.1f}" for seconds in each.all_of_8),
        )
