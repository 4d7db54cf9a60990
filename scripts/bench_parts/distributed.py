"""Measures how much more a step costs over several ranks than in one process.

All ranks are on this machine and share its cores, over loopback. So the figures show what a group
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
from mlx_server.clients.bench import Result, Target, Workload, milliseconds, run, warm_up

WORDS = 16
REPETITIONS = 2


@dataclass(frozen=True)
class Plan:
    ranks: int
    clients: tuple[int, ...]
    short: int
    """The numbers of tokens of a short answer and of a longer one: they differ by the bytes of
    their steps."""
    long: int


PLANS: dict[Model, Plan] = {
    "tiny": Plan(2, (1, 4), 16, 80),
    "demo": Plan(3, (1,), 4, 20),  # two ranks can't share its nine heads
}


@dataclass(frozen=True)
class StepCost:
    model: Model
    ranks: int
    clients: int
    alone: float
    """Seconds of a step in one process."""
    group: float
    ring_bytes: float | None
    """Bytes that each rank sends to the others in a step; None where there is no `ss`."""
    input_bytes: float | None
    """Bytes of a step's inputs that rank 0 sends to each other rank."""


def costs(models: list[Model]) -> Iterator[StepCost]:
    for model in models:
        folder, plan = model_folder(model), PLANS[model]
        with _server(folder, 1) as alone:
            alone_steps = {each: _seconds(alone, plan, each) for each in plan.clients}
        with _server(folder, plan.ranks) as group:
            for clients in plan.clients:
                seconds = _seconds(group, plan, clients)
                sent = _bytes(group, plan, clients)
                yield StepCost(model, plan.ranks, clients, alone_steps[clients], seconds, *sent)


@dataclass(frozen=True)
class _Running:
    target: Target
    pid: int
    ranks: int
    port: int
    """The first of the ring's ports."""


@contextmanager
def _server(folder: Path, ranks: int) -> Iterator[_Running]:
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * ranks
    port = 20_000 + free_port() % 10_000  # ports that no client gets
    split = {"distributed": {"hosts": hosts, "port": port}} if ranks > 1 else {}
    with TemporaryDirectory() as own:
        config = Path(own) / "models.yaml"
        models = {"measured": {"source": str(folder), **split}}
        config.write_bytes(msgspec.json.encode({"models": models}))  # YAML includes JSON
        command = ["mlx_server", "serve", "--config", str(config), "--log-level", "error"]
        with answering(command, "measured", folder, {}) as (pid, target):
            yield _Running(target, pid, ranks, port)


def _seconds(server: _Running, plan: Plan, clients: int) -> float:
    """Returns the seconds of a step."""
    asyncio.run(warm_up(server.target, Workload(clients, clients, WORDS, plan.short)))
    found = [_answered(server, clients, plan.long) for _ in range(REPETITIONS)]
    answers = [answer for result in found for answer in result.answers]
    # a busy machine sends several tokens at once, so single gaps are no steps
    return median(sum(answer.gaps) / (answer.tokens - 1) for answer in answers)


def _answered(server: _Running, clients: int, tokens: int) -> Result:
    result = asyncio.run(run(server.target, Workload(clients, clients, WORDS, tokens)))
    if result.errors:
        raise RuntimeError(result.errors[0])
    return result


def _bytes(group: _Running, plan: Plan, clients: int) -> tuple[float | None, float | None]:
    """Returns the bytes of a step: those that a rank sends over the ring, and those of the
    inputs."""
    counted = []
    for tokens in (plan.short, plan.long):
        before = _sent(group)
        _answered(group, clients, tokens)
        counted.append([_less(a, b) for a, b in zip(_sent(group), before, strict=True)])
    ring, inputs = (_less(long, short) for short, long in zip(*counted, strict=True))
    steps = plan.long - plan.short
    return (
        None if ring is None else ring / group.ranks / steps,
        None if inputs is None else inputs / steps,
    )


def _less(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a - b


def _sent(group: _Running) -> tuple[int | None, int | None]:
    return _sent_over_ring(group), _read_by_followers(group)


def _sent_over_ring(group: _Running) -> int | None:
    """Returns the bytes that all ranks together have sent: each end of a connection counts its
    own."""
    ports = range(group.port, group.port + group.ranks)
    ends = " or ".join(f"sport = :{port} or dport = :{port}" for port in ports)
    command = ["ss", "-tinHO", ends]  # no header, one line each, with the bytes that were sent
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return sum(map(int, re.findall(r"bytes_sent:(\d+)", found.stdout)))


def _read_by_followers(group: _Running) -> int | None:
    """Returns the mean bytes that a follower has read; None where the system does not count
    them."""
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
