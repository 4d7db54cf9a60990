"""Measures what the gateway adds: a server is asked directly and through a second one."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import psutil

from bench_parts.contenders import answering
from bench_parts.models import model_folder
from bench_parts.plan import Case
from bench_parts.tables import Row
from mlx_server.clients.bench import Result, Target, run, warm_up

CASES = (Case("tiny", 1, 16, 64), Case("tiny", 16, 64, 64), Case("demo", 16, 16, 64, 64))
TURNS = 5
COLUMNS = (
    *("model", "clients", "first token, ms", "by the gateway", "more"),
    *("tokens/s", "by the gateway", "ratio", "gateway's CPU, ms a token"),
)
Measured = dict[str, Any]


def costs(turns: int = TURNS) -> Iterator[Measured]:
    for model in dict.fromkeys(case.model for case in CASES):
        with _servers(model_folder(model)) as (direct, gateway, process):
            for case in (case for case in CASES if case.model == model):
                yield _cost(case, direct, gateway, process, turns)


@contextmanager
def _servers(folder: Path) -> Iterator[tuple[Target, Target, psutil.Process]]:
    """Yields the upstream, the gateway to it, and the gateway's process."""
    command = ["mlx_server", "serve", "--log-level", "error"]
    with (
        answering([*command, str(folder)], folder.name, folder, {}) as (_, direct),
        TemporaryDirectory() as own,
    ):
        model = {"source": f"openai+{direct.url}/v1", "upstream_model": folder.name}
        config = Path(own) / "models.yaml"
        config.write_bytes(msgspec.json.encode({"models": {"there": model}}))  # YAML includes JSON
        command += ["--config", str(config)]
        with answering(command, "there", folder, {}) as (pid, gateway):
            there, here = replace(direct, api="chat"), replace(gateway, api="chat")
            yield there, here, psutil.Process(pid)


def _cost(
    case: Case, direct: Target, gateway: Target, process: psutil.Process, turns: int
) -> Measured:
    """Measures both ways in turns, so that other work of the machine slows both."""
    pairs: list[tuple[Result, Result]] = []
    seconds: list[float] = []
    for turn in range(turns):
        results = []
        for target in (direct, gateway):
            load = case.load(f"{turn} {target.url}")
            asyncio.run(warm_up(target, load))
            before = process.cpu_times()
            results.append(found := asyncio.run(run(target, load)))
            after = process.cpu_times()
            if found.errors:
                raise RuntimeError(found.errors[0])
        pairs.append((results[0], results[1]))
        spent = after.user + after.system - before.user - before.system
        seconds.append(spent / sum(answer.tokens for answer in results[1].answers))
    firsts = [(a.first_token.median, b.first_token.median) for a, b in pairs]
    speeds = [(a.tokens_per_second, b.tokens_per_second) for a, b in pairs]
    return {
        "model": case.model,
        "clients": case.clients,
        "first_token": [median(each) for each in zip(*firsts, strict=True)],
        "first_token_more": median(b - a for a, b in firsts),
        "tokens_per_second": [median(each) for each in zip(*speeds, strict=True)],
        "ratio": median(b / a for a, b in speeds),
        "cpu_per_token": median(seconds),
    }


def rows(costs: list[Measured]) -> Iterator[Row]:
    for each in costs:
        yield (
            each["model"],
            str(each["clients"]),
            *(f"{1e3 * seconds:.1f}" for seconds in each["first_token"]),
            f"{1e3 * each['first_token_more']:.1f}",
            *(f"{speed:.0f}" for speed in each["tokens_per_second"]),
            f"{each['ratio']:.3f}",
            f"{1e3 * each['cpu_per_token']:.3f}",
        )


def goals(costs: list[Measured]) -> Iterator[Row]:
    one, many, demo = costs
    first, ratio = 1e3 * one["first_token_more"], demo["ratio"]
    cpu = 1e3 * many["cpu_per_token"]
    for what, bound, value, reached in (
        ("tiny, 1 client: ms more to the first token", "<= 10", first, first <= 10),
        ("demo, 16 clients: tokens/s over the upstream's", ">= 0.95", ratio, ratio >= 0.95),
        ("tiny, 16 clients: ms of the gateway's CPU a token", "<= 0.3", cpu, cpu <= 0.3),
    ):
        yield what, bound, f"{value:.3f}", "yes" if reached else "no"
