"""What adapters cost: a step of decoding, a load, and servers whose clients alternate."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx

from bench_parts.apart import apart
from bench_parts.contenders import LORA_SERVERS
from bench_parts.lora import ADAPTERS
from mlx_server.clients.bench import milliseconds

SAMPLES = Path(__file__).parents[2] / "adapters"
NAMES = ("pirate", "json-answer")
CLIENTS = 4
REQUESTS = 3
"""The number of requests of each client."""
MAX_TOKENS = 24
MOST_SECONDS = 300.0

Row = tuple[str, ...]
Columns = tuple[Row, Iterator[Row]]
Measured = dict[str, Any]


def costs(folder: Path) -> Measured:
    return apart("bench_parts.lora", folder)


def side_by_side(folder: Path) -> dict[str, Measured]:
    found = {}
    for name, start in LORA_SERVERS.items():
        with start(folder) as target:
            found[name] = asyncio.run(_alternating(target.url, target.model))
    return found


async def _alternating(url: str, model: str) -> Measured:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=MOST_SECONDS) as http:
        for place in range(len(NAMES)):
            await _first_text(http, model, place)
        began = perf_counter()
        times = await asyncio.gather(*(_client(http, model, n) for n in range(CLIENTS)))
        seconds = perf_counter() - began
    return {
        "requests_per_second": CLIENTS * REQUESTS / seconds,
        "first_token": median(first for firsts in times for first in firsts),
    }


async def _client(http: httpx.AsyncClient, model: str, number: int) -> list[float]:
    return [await _first_text(http, model, number + turn) for turn in range(REQUESTS)]


async def _first_text(http: httpx.AsyncClient, model: str, place: int) -> float:
    """Returns the seconds to the first text, once the answer is complete."""
    body = {
        "model": model,
        "adapters": str(SAMPLES / NAMES[place % len(NAMES)]),
        "messages": [{"role": "user", "content": f"What is the capital of country {place}?"}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    began, first = perf_counter(), None
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if first is None and _has_text(line):
                first = perf_counter() - began
    assert first is not None, "an answer without text"
    return first


def _has_text(line: str) -> bool:
    if not line.startswith("data: {"):
        return False
    choices = json.loads(line[6:])["choices"]
    return any(choice.get("delta", {}).get("content") for choice in choices)


def decoding(costs: Measured) -> Columns:
    """Tabulates the time of decoding steps, as a factor on that of the unchanged base."""
    names = ["fused", *(f"{count} adapters" for count in ADAPTERS)]
    columns = ("rows", "base, ms", *names)
    steps = costs["steps"].items()
    rows = (
        (rows, f"{step['base']:.1f}", *(f"{step[n]:.2f}" if n in step else "" for n in names))
        for rows, step in steps
    )
    return columns, rows


def servers(sides: dict[str, Measured]) -> Columns:
    columns = ("server, two adapters in turns", "requests/s", "first token, ms")
    rows = (
        (name, f"{side['requests_per_second']:.2f}", milliseconds(side["first_token"]))
        for name, side in sides.items()
    )
    return columns, rows


def goals(costs: Measured) -> Columns:
    steps, kept = costs["steps"], costs["bytes"]["kept"]
    idle = [step["0 adapters"] for step in steps.values()]
    mixed, load = steps["16"]["8 over 1"], costs["load_ms"]["median"]
    rows = [
        ("no adapter in use, over the base: most", "<= 1.05", max(idle), max(idle) <= 1.05),
        ("no adapter in use, over the base: least", ">= 0.95", min(idle), min(idle) >= 0.95),
        ("16 rows, 8 adapters over 1", "<= 1.10", mixed, mixed <= 1.10),
        ("load of an adapter, ms", "< 100", load, load < 100),
        ("memory of an adapter over its file", "<= 1.1", kept, kept <= 1.1),
    ]
    shown = ((what, bound, f"{v:.3f}", "yes" if good else "no") for what, bound, v, good in rows)
    return ("goal", "wanted", "measured", "reached"), shown
