"""What a step of a model over several ranks costs more than one of the same model alone.

All ranks are on this machine and share its cores, over loopback. So the figures say what a group
adds (messages, and the work that is not split), and not what a second machine would save.
"""

import asyncio
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
import psutil

from bench_parts.adapters import Row
from bench_parts.contenders import answering, free_port
from bench_parts.models import model_folder
from bench_parts.plan import Model
from mlx_server.clients.bench import run, warm_up
from mlx_server.clients.bench.exchange import Target
from mlx_server.clients.bench.report import milliseconds
from mlx_server.clients.bench.result import Result, Workload

RANKS: dict[Model, int] = {"tiny": 2, "demo": 3}
"""The demo model has nine heads, which two ranks can't share."""

CLIENTS = (1, 4)
WORDS = 16
SHORT, LONG = 16, 80
"""Tokens of the answers: the bytes of a step are those by which these two differ."""

REPETITIONS = 2


@dataclass(frozen=True)
class StepCost:
    model: Model
    ranks: int
    clients: int
    alone: float
    """Seconds of a step."""
    group: float
    ring_bytes: float | None
    """What each rank sends to the others in a step; None where there is no `ss`."""
    input_bytes: float | None
    """What rank 0 sends each other rank of the step's inputs."""


def costs(models: list[Model]) -> Iterator[StepCost]:
    for model in models:
        folder, ranks = model_folder(model), RANKS[model]
        with _server(folder, 1) as alone:
            alone_steps = {clients: _seconds(alone.target, clients) for clients in CLIENTS}
        with _server(folder, ranks) as group:
            for clients in CLIENTS:
                seconds = _seconds(group.target, clients)
                ring, inputs = _bytes(group, clients)
                yield StepCost(model, ranks, clients, alone_steps[clients], seconds, ring, inputs)


@dataclass(frozen=True)
class _Running:
    target: Target
    pid: int
    ranks: int
    port: int
    """The first of the ring's."""


@contextmanager
def _server(folder: Path, ranks: int) -> Iterator[_Running]:
    hosts, port = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * ranks, free_port()
    split = {"distributed": {"hosts": hosts, "port": port}} if ranks > 1 else {}
    with TemporaryDirectory() as own:
        config = Path(own) / "models.yaml"
        models = {"measured": {"source": str(folder), **split}}
        config.write_bytes(msgspec.json.encode({"models": models}))  # JSON is YAML
        command = ["mlx_server", "serve", "--config", str(config), "--log-level", "error"]
        with answering(command, "measured", folder, {}) as (pid, target):
            yield _Running(target, pid, ranks, port)


def _seconds(target: Target, clients: int) -> float:
    asyncio.run(warm_up(target, Workload(clients, clients, WORDS, SHORT)))
    found = [_answered(target, clients, LONG) for _ in range(REPETITIONS)]
    return median(result.gap.median for result in found)


def _answered(target: Target, clients: int, tokens: int) -> Result:
    load = Workload(clients, clients, WORDS, tokens)
    result = asyncio.run(run(target, load))
    if result.errors:
        raise RuntimeError(result.errors[0])
    return result


def _bytes(group: _Running, clients: int) -> tuple[float | None, float | None]:
    """Of a step."""
    counted = []
    for tokens in (SHORT, LONG):
        before = _sent(group)
        _answered(group.target, clients, tokens)
        counted.append([_less(a, b) for a, b in zip(_sent(group), before, strict=True)])
    ring, inputs = (_less(long, short) for short, long in zip(*counted, strict=True))
    steps = LONG - SHORT
    return (
        None if ring is None else ring / group.ranks / steps,
        None if inputs is None else inputs / steps,
    )


def _less(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a - b


def _sent(group: _Running) -> tuple[int | None, int | None]:
    return _sent_over_ring(group), _read_by_followers(group)


def _sent_over_ring(group: _Running) -> int | None:
    """By all ranks together: each end of a connection counts what it sends."""
    ports = range(group.port, group.port + group.ranks)
    ends = " or ".join(f"sport = :{port} or dport = :{port}" for port in ports)
    command = ["ss", "-tinHO", ends]  # no header, one line each, with the bytes that were sent
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return sum(map(int, re.findall(r"bytes_sent:(\d+)", found.stdout)))


def _read_by_followers(group: _Running) -> int | None:
    """By each, in the mean; None where the system does not count it."""
    followers = [
        child
        for child in psutil.Process(group.pid).children(recursive=True)
        if "mlx_server.worker.ranks.follower" in child.cmdline()
    ]
    if not hasattr(psutil.Process, "io_counters"):
        return None
    return sum(each.io_counters().read_chars for each in followers) // len(followers)


COLUMNS = (
    "model, ranks",
    "clients",
    "a step alone, ms",
    "over the ranks, ms",
    "more, ms",
    "each rank sends, bytes a step",
    "inputs to each, bytes a step",
)


def rows(found: list[StepCost]) -> Iterator[Row]:
    for cost in found:
        yield (
            f"{cost.model}, {cost.ranks}",
            str(cost.clients),
            milliseconds(cost.alone),
            milliseconds(cost.group),
            milliseconds(cost.group - cost.alone),
            *(
                "" if each is None else f"{each:.0f}"
                for each in (cost.ring_bytes, cost.input_bytes)
            ),
        )
