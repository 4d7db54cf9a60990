"""Measures sixteen short prompts at once on a simulated Mac, alone and next to a stream."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench_parts.simulated import servers
from bench_parts.tables import Row
from mlx_server.clients.bench import Target

PROMPT, COUNT, ANSWER = 200, 16, 32
STREAM_PROMPT = 300


@dataclass(frozen=True)
class ShortPrompts:
    """The measured times of one server, in seconds."""

    pair: str
    server: str
    alone: servers.Crowd
    next_to_stream: servers.Crowd
    """The same prompts next to a stream."""
    gap: float
    """The longest pause of that stream meanwhile."""


def measured(pair: str, server: str, own: Path | None) -> ShortPrompts:
    with servers.SERVERS[server](pair, own) as target:
        return asyncio.run(_scenarios(pair, server, target))


async def _scenarios(pair: str, server: str, target: Target) -> ShortPrompts:
    await servers.ask(target, 20, 4)
    await servers.ask(target, servers.PROMPT, 4)
    alone = await servers.crowd(target, COUNT, PROMPT, ANSWER)
    async with servers.streaming(target, STREAM_PROMPT) as stream:
        next_to_stream = await servers.crowd(target, COUNT, PROMPT, ANSWER)
    times = [
        time for time in stream.times() if next_to_stream.began <= time <= next_to_stream.ended
    ]
    gaps = [b - a for a, b in pairwise([next_to_stream.began, *times, next_to_stream.ended])]
    return ShortPrompts(pair, server, alone, next_to_stream, max(gaps))


COLUMNS = (
    "machine, model",
    "server",
    "16 x 200: mean first token, s",
    "all done",
    "next to a stream: mean first token",
    "all done",
    "the stream's longest gap",
)


def rows(found: list[ShortPrompts]) -> Iterator[Row]:
    for each in found:
        crowds = (each.alone, each.next_to_stream)
        seconds = [s for crowd in crowds for s in (crowd.first_token, crowd.done)]
        yield (
            each.pair.replace(":", ", "),
            each.server,
            *(f"{s:.2f}" for s in seconds),
            f"{each.gap:.2f}",
        )
