"""Attacks by hostile upstreams, while other clients ask a model of the same server."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import httpx
import psutil

from attack_parts.outcomes import control
from attack_parts.servers import Started
from tests.hostile.upstreams import ATTACKS, HostileServer

BYTES = 4 << 20
"""About what each attack sends."""
ATTACK_SECONDS = 30.0
"""The time after which an attack is ended, as a client that leaves does."""
QUIET_SECONDS = 5.0
"""How long the server is observed without an attack."""
HEALTH_SECONDS = 0.1
"""The longest that `/health` may take; twice as long as without an attack on a busy machine."""
MOST_GROWTH = 10
"""How many times the bytes that were sent the server's memory may grow by."""
SMALL_GROWTH = 64 << 20
"""Growth of the memory that says nothing: buffers, and what is freed later."""

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@dataclass
class Effects:
    """What others see of an attack, and what it costs."""

    sent: int = 0
    seconds: float = 0.0
    health: float = 0.0
    """The longest wait for `/health`."""
    growth: int = 0
    controls: set[str | None] = field(default_factory=set)

    def failures(self, before: str, quiet: "Effects") -> Iterator[str]:
        if self.controls != {before}:
            yield "control changed"
        if self.health > max(HEALTH_SECONDS, 2 * quiet.health):
            yield "health late"
        if self.growth > max(MOST_GROWTH * self.sent, SMALL_GROWTH):
            yield "memory"


def attacked_by_upstreams(folder: Path) -> Iterator[tuple[str, Effects, list[str]]]:
    """Yields each attack with its effects, and what of them should not be."""
    upstreams = {name: HostileServer(partial(stream, BYTES)) for name, stream in ATTACKS.items()}
    with TemporaryDirectory() as work:
        models = {
            folder.name: {"source": str(folder)},
            **{
                name: {"source": f"openai+{each.url}/v1", "upstream": {"retries": 0}}
                for name, each in upstreams.items()
            },
        }
        Path(work, "models.yaml").write_text(json.dumps({"models": models}))
        command = ("mlx_server", "serve", "--log-level", "error")
        server = Started("mlx-server", command, folder.name, Path(work))
        server.start()
        try:
            before = control(server)
            if before is None:
                raise SystemExit("The server does not answer the control request.")
            quiet = Effects()
            with _observed(server, quiet):
                time.sleep(QUIET_SECONDS)
            yield "none", quiet, list(quiet.failures(before, quiet))
            for name, upstream in upstreams.items():
                effects = _effects(server, name, upstream)
                yield name, effects, list(effects.failures(before, quiet))
        finally:
            server.stop()


def _effects(server: Started, model: str, upstream: HostileServer) -> Effects:
    effects = Effects()
    _ask(server, model)  # what is done once is no part of the attack
    with _observed(server, effects):
        began = time.monotonic()
        _ask(server, model)
        effects.seconds = time.monotonic() - began
    effects.sent = upstream.sent
    return effects


@contextmanager
def _observed(server: Started, effects: Effects) -> Iterator[None]:
    process = psutil.Process(server.pid)
    begun = process.memory_info().rss
    over = Event()

    def look() -> None:
        effects.growth = max(effects.growth, process.memory_info().rss - begun)

    def check() -> None:
        began = time.perf_counter()
        http.get("/health")
        effects.health = max(effects.health, time.perf_counter() - began)

    def ask() -> None:
        effects.controls.add(control(server))

    def repeat(work: Callable[[], object]) -> None:
        while not over.is_set():
            work()
            over.wait(0.02)

    with server.http() as http:
        http.get("/health")
        threads = [Thread(target=repeat, args=(work,)) for work in (look, check, ask)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()


def _ask(server: Started, model: str) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [TOOL],
        "stream": True,
    }
    with (
        suppress(httpx.HTTPError),
        httpx.Client(base_url=server.url, trust_env=False, timeout=ATTACK_SECONDS) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        ends = time.monotonic() + ATTACK_SECONDS
        for _ in response.iter_raw():
            if time.monotonic() > ends:
                return
