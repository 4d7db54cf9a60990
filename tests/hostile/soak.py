"""Requests of random shapes, thousands of them, and what they leave in memory: `scripts/soak`."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import psutil
import typer

from mlx_server import limits
from mlx_server.pool.memory import footprint
from tests.hostile.shapes import CONVERSATIONS, Client
from tests.live.server import LiveServer, children, eventually, serving
from tests.tiny import tiny_llama
from tests.worker.lora_files import mlx_adapter

AT_ONCE = 4
WARM = 500
GROWTH = 0.02

BUDGET, DISK = 40_000_000, 8_000_000
"""Bytes that are full long before the first 500 are answered: the engine lists the prompt cache's
files in memory, some 700 bytes for each of 65,536 at most."""

FILLING = 100, 25_000
"""Conversations and the characters of each: more than SQLite keeps of its file in memory."""


@dataclass(frozen=True)
class Held:
    """What server and engine hold while nothing is asked of them."""

    server: int
    engine: int
    """Bytes."""
    files: int
    threads: int
    children: int

    def __str__(self) -> str:
        sizes = f"{self.server / 1e6:10.2f}{self.engine / 1e6:10.2f}"
        return f"{sizes}{self.files:8}{self.threads:9}{self.children:10}"


HEADINGS = "requests    server    engine   files  threads  children  (MB of each process)"


def held(server: LiveServer) -> Held:
    both = [psutil.Process(server.process.pid), server.engine]
    return Held(
        server=footprint(server.process.pid),
        engine=footprint(server.engine.pid),
        files=sum(process.num_fds() for process in both),
        threads=sum(process.num_threads() for process in both),
        children=len(children(server.process.pid)),
    )


def soaked(folder: Path) -> dict[str, Any]:
    """The configuration: one of its two models is loaded and unloaded over and over."""
    paths = {id: tiny_llama(folder / id, seed=seed) for seed, id in enumerate("ab")}
    adapters = {
        name: {"path": str(mlx_adapter(folder / name, paths["a"], seed=seed))}
        for seed, name in enumerate("xy")
    }
    models: dict[str, Any] = {id: {"source": str(path)} for id, path in paths.items()}
    models["a"]["adapters"] = adapters
    models["b"]["ttl"] = 0.2
    return {
        "server": {"memory_budget": BUDGET, "prompt_cache": {"disk": DISK}, "log_level": "warning"},
        "store": {"data_dir": str(folder / "store")},
        "models": models,
    }


@contextmanager
def connected(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, verify=False, timeout=60) as http:
        yield http


def fill(http: httpx.Client) -> None:
    """What has a limit, and would fill slowly: that is no growth."""
    times, length = FILLING
    said = {"type": "message", "role": "user", "content": "x" * length}
    for _ in range(times):
        assert http.post(CONVERSATIONS, json={"items": [said]}).status_code == 200


def settle(http: httpx.Client, seed: int) -> None:
    """The grammars that the engine keeps are of one kind, which take the most; and with a model
    it gives back all that it has no use for."""
    client = Client(http, seed)
    for _ in range(limits.COMPILED_GRAMMARS):
        client.tool()
    client.chat_with("b")
    eventually(lambda: is_unloaded("b", http), "it is unloaded")


def is_unloaded(model: str, http: httpx.Client) -> bool:
    found = http.get("/v1/pool").json()["models"]
    return any(each["id"] == model and each["state"] == "unloaded" for each in found)


def soak(server: LiveServer, seeds: range) -> Held:
    """A request of each seed, on a connection of its own; what is held when all are answered."""

    def ask(seed: int) -> None:
        with connected(server.url) as http:
            Client(http, seed).send()

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(ask, seeds))
    eventually(server.idle, "nothing is asked of it any more")
    with connected(server.url) as http:
        settle(http, -seeds.stop)
    return held(server)


def main(
    requests: Annotated[int, typer.Option(min=2 * WARM, help="How many.")] = 5000,
    seed: Annotated[int, typer.Option(help="Of the first one; others follow.")] = 0,
    storm: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Everything at once, for so long.")
    ] = None,
) -> None:
    """Sends requests of random shapes, and fails if what the server and its engine hold after all
    of them is over 2 % more than what they held after the first 500.

    With --storm: clients of every bad kind at once, with kills of the engine, next to a control
    client; fails if the control client's tokens change or if anything is left over."""
    # a tiny model has buffers below the size from which the engine gives them back to the system
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "4096")
    if storm is not None:
        from tests.hostile import storm as storms

        wrong = storms.storm(storm, seed)
        print(*wrong or ["nothing went wrong"], sep="\n")
        raise typer.Exit(bool(wrong))
    print(HEADINGS)
    with TemporaryDirectory() as name, serving(Path(name), soaked(Path(name))) as server:
        with connected(server.url) as http:
            fill(http)
        seen = []
        for start in range(0, requests, WARM):
            end = min(start + WARM, requests)
            seen.append(soak(server, range(seed + start, seed + end)))
            print(f"{end:8}{seen[-1]}", flush=True)
    first, last = seen[0], seen[-1]
    growth = {name: getattr(last, name) / getattr(first, name) - 1 for name in ("server", "engine")}
    print(", ".join(f"{name} {part:+.1%}" for name, part in growth.items()))
    raise typer.Exit(any(part > GROWTH for part in growth.values()))


if __name__ == "__main__":
    typer.run(main)
