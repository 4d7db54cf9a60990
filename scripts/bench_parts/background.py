"""Measures what goes on next to a person's answers: sub-agents with a batch, a batch alone, and the
training of an adapter. A server runs for each, on this machine."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from bench_parts.contenders import answering
from bench_parts.models import model_folder
from bench_parts.tables import Row
from bench_parts.training import BATCH, EPOCHS, LAYERS, samples
from mlx_server.clients.bench import Exchange, RequestTiming, Result, Spread, Target, Workload, run
from mlx_server.requests import Tier

KEYS = {"person": Tier.DEFAULT, "agent": Tier.FLEX}
MODEL = "base"
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Use:
    seconds: float
    processor: float


@dataclass(frozen=True)
class Running:
    """A server with the keys of KEYS."""

    pid: int
    url: str

    def loaded(self, key: str, load: Workload) -> Result:
        target = Target(self.url, MODEL, key, api="completions")
        return asyncio.run(run(target, load))

    @contextmanager
    def http(self) -> Iterator[httpx.Client]:
        headers = {"Authorization": "Bearer person"}
        with httpx.Client(
            base_url=self.url, headers=headers, timeout=60, trust_env=False
        ) as client:
            yield client

    def processes(self, module: str = "") -> list[psutil.Process]:
        root = psutil.Process(self.pid)
        return [
            p for p in (root, *root.children(recursive=True)) if module in " ".join(p.cmdline())
        ]

    def processor_seconds(self, module: str = "") -> float:
        return sum(sum(each.cpu_times()[:2]) for each in self.processes(module))

    def use(self, work: Callable[[], object]) -> "Use":
        used, began = self.processor_seconds(), time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        return Use(seconds, self.processor_seconds() - used)

    def batch(self, lines: int, tokens: int, words: int) -> str:
        """Returns its path."""
        prompts = Workload(1, lines, words, tokens, seed=f"{time.monotonic_ns()}").prompts()
        common = {"model": MODEL, "max_tokens": tokens, "temperature": 0}
        bodies = ({**common, "prompt": each} for each in prompts)
        text = "".join(
            json.dumps(
                {"custom_id": f"{at}", "method": "POST", "url": "/v1/completions", "body": body}
            )
            + "\n"
            for at, body in enumerate(bodies)
        )
        with self.http() as http:
            files = {"file": ("lines.jsonl", text.encode())}
            sent = http.post("/v1/files", data={"purpose": "batch"}, files=files).raise_for_status()
            asked = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions"}
            asked["completion_window"] = "24h"
            batch = http.post("/v1/batches", json=asked).raise_for_status().json()
            return f"/v1/batches/{batch['id']}"

    def state(self, path: str) -> dict[str, Any]:
        with self.http() as http:
            state: dict[str, Any] = http.get(path).raise_for_status().json()
            return state

    def answered(self, batch: str) -> int:
        """Returns how many lines of the batch have their answers."""
        return int(self.state(batch)["request_counts"]["completed"])


@contextmanager
def running(name: str) -> Iterator[Running]:
    folder = model_folder(name)
    with TemporaryDirectory() as own:
        (Path(own) / "adapters").mkdir()
        keys = [{key: tier.label} for key, tier in KEYS.items()]
        config = {
            "models": {MODEL: {"source": str(folder), "preload": True}},
            "server": {"api_keys": keys, "adapters_dir": f"{own}/adapters"},
        }
        (Path(own) / "models.yaml").write_text(json.dumps(config))
        command = ["mlx_server", "serve", "--config", f"{own}/models.yaml", "--log-level", "error"]
        variables = {"MLX_SERVER_DATA": f"{own}/data"}
        with answering(command, MODEL, folder, variables) as (pid, target):
            yield Running(pid, target.url)


# A person next to sub-agents and a batch: the clients of `bench_parts.simulated.tiers`

ASKS, TURNS = 10, 3
WORDS, TOKENS = 2_000, 200
AGENTS, AGENT_WORDS, AGENT_TOKENS = 4, 1_500, 150
LINES, LINE_TOKENS, LINE_WORDS = 20_000, 50, 40
ALONE_SECONDS = 10.0


@dataclass(frozen=True)
class Asked:
    began: float
    ended: float
    timing: RequestTiming


@dataclass(frozen=True)
class Turn:
    """What a person's requests took next to others, and when anybody waited for an answer."""

    person: list[Asked]
    all: list[Asked]
    seconds: float

    @property
    def left(self) -> float:
        """The share of the time in which nobody waited."""
        waited, until = 0.0, 0.0
        for asked in sorted(self.all, key=lambda each: each.began):
            waited += max(0.0, asked.ended - max(asked.began, until))
            until = max(until, asked.ended)
        return 1 - waited / self.seconds


@dataclass(frozen=True)
class KeptPace:
    """What a person keeps of its pace next to agents and a batch, and the batch of what is left."""

    first_token: float
    """Times alone, at the 95th percentile."""
    speed: float
    """Share of alone, at the 5th percentile."""
    batch: float
    """Lines over those that it gets alone in the time in which nobody waits without it."""


def kept_pace(model: str) -> KeptPace:
    with running(model) as server:
        asyncio.run(turn(server, 0.0, 0))
        alone, mixed, shares = (
            asyncio.run(turn(server, 0.0, 0)).person,
            list[Asked](),
            list[float](),
        )
        for _ in range(TURNS):
            pause = fmean(each.ended - each.began for each in alone)
            others = asyncio.run(turn(server, pause, AGENTS))
            batch = server.batch(LINES, LINE_TOKENS, LINE_WORDS)
            while not (before := server.answered(batch)):
                time.sleep(LOOK_SECONDS)
            time.sleep(ALONE_SECONDS)
            between = server.answered(batch)
            both = asyncio.run(turn(server, pause, AGENTS))
            mixed += both.person
            got = (server.answered(batch) - between) / both.seconds
            shares.append(got * ALONE_SECONDS / (between - before) / others.left)
            with server.http() as http:
                http.post(f"{batch}/cancel").raise_for_status()
            alone += asyncio.run(turn(server, 0.0, 0)).person  # soon, as others use the machine too
    return KeptPace(
        _p95(each.timing.first_token for each in mixed)
        / _p95(each.timing.first_token for each in alone),
        _p95(sum(each.timing.gaps) for each in alone)
        / _p95(sum(each.timing.gaps) for each in mixed),
        median(shares),
    )


async def turn(server: Running, pause: float, agents: int) -> Turn:
    """A person asks so many times, with pauses, next to agents with pauses six times as long."""
    asked, began = list[Asked](), time.perf_counter()

    async def ask(key: str, words: int, tokens: int) -> Asked:
        target = Target(server.url, MODEL, key, api="completions")
        prompt = Workload(1, 1, words, tokens, seed=f"{time.monotonic_ns()}").prompt(0)
        exchange, start = Exchange(target, prompt, tokens), time.perf_counter()
        await exchange.run()
        asked.append(Asked(start, time.perf_counter(), exchange.answer()))
        return asked[-1]

    async def agent(number: int) -> None:
        await asyncio.sleep(pause * number)
        for count in itertools.count(1):
            await ask("agent", AGENT_WORDS, AGENT_TOKENS)
            await asyncio.sleep(6 * pause * (0.5 + count * 0.618 % 1))

    agents_asking = [asyncio.create_task(agent(number)) for number in range(agents)]
    person = list[Asked]()
    for count in range(1, ASKS + 1):
        person.append(await ask("person", WORDS, TOKENS))
        await asyncio.sleep(pause * (0.5 + count * 0.618 % 1))
    for each in agents_asking:
        each.cancel()
    return Turn(person, asked, time.perf_counter() - began)


def _p95(values: Iterable[float]) -> float:
    return Spread.of(values).p95


# A batch alone

BATCH_LINES, BATCH_TOKENS, BATCH_WORDS = 2_000, 8, 20
CLIENTS = 16


@dataclass(frozen=True)
class BatchCost:
    lines: int
    batch: Use
    direct: Use
    """By so many clients at once, without files."""
    memory: int
    """The server's process, before the file is sent."""
    peak: int


def batch_cost(lines: int = BATCH_LINES) -> BatchCost:
    with running("tiny") as server:
        load = Workload(CLIENTS, lines, BATCH_WORDS, BATCH_TOKENS, seed="direct")
        server.loaded("person", replace(load, requests=CLIENTS, seed="first"))
        direct = server.use(lambda: server.loaded("person", load))
        own, *_ = server.processes()
        memory = [own.memory_info().rss]

        def ask() -> None:
            batch = server.batch(lines, BATCH_TOKENS, BATCH_WORDS)
            while server.state(batch)["status"] != "completed":
                memory.append(own.memory_info().rss)
                time.sleep(LOOK_SECONDS)

        batch = server.use(ask)
    return BatchCost(lines, batch, direct, memory[0], max(memory))


# Streams next to a training

STREAMS = Workload(clients=4, requests=8, words=60, max_tokens=48)
TRAINER = "mlx_server.worker.trainer"


@dataclass(frozen=True)
class StreamsBeside:
    speed: float
    """Of four streams while an adapter is trained, over that alone."""
    trainer: float
    """The processor seconds of the training for each second of the streams."""
    base: float
    adapter: float
    """What the base model and the adapter lose a token of what was held out."""
    is_served: bool
    """The adapter, by the server that trained it."""
    error: str = ""
    """Why it is not published."""


def streams_beside(model: str = "real", epochs: int = EPOCHS) -> StreamsBeside:
    with running(model) as server, server.http() as http:
        lines = "\n".join(samples()).encode()
        files = {"file": ("pirate.jsonl", lines)}
        sent = http.post("/v1/files", data={"purpose": "fine-tune"}, files=files).json()
        settings = {"n_epochs": epochs, "batch_size": BATCH, "layers": LAYERS}
        body = {"model": MODEL, "training_file": sent["id"], "suffix": "pirate", "seed": 0}
        server.loaded("person", STREAMS)
        alone = _speed(server, "alone")
        job = http.post("/v1/fine_tuning/jobs", json={**body, "hyperparameters": settings}).json()
        path = f"/v1/fine_tuning/jobs/{job['id']}"
        while not (server.state("/v1/pool")["training"] or {}).get("step"):
            time.sleep(LOOK_SECONDS)
        speeds, used = list[float](), list[float]()
        for turn in range(TURNS):
            before = server.processor_seconds(TRAINER)
            use = server.use(lambda: speeds.append(_speed(server, f"beside {turn}")))  # noqa: B023
            used.append((server.processor_seconds(TRAINER) - before) / use.seconds)
        while server.state(path)["finished_at"] is None:
            time.sleep(LOOK_SECONDS)
        losses = [
            each["data"]["full_valid_loss"]
            for each in server.state(f"{path}/events?limit=100")["data"]
            if "full_valid_loss" in (each.get("data") or {})
        ]
        asked = {"model": f"{MODEL}:pirate", "prompt": "a", "max_tokens": 4}
        served = http.post("/v1/completions", json=asked).is_success
        why = (server.state(path)["error"] or {}).get("message", "")
    return StreamsBeside(median(speeds) / alone, median(used), losses[-1], losses[0], served, why)


def _speed(server: Running, seed: str) -> float:
    return server.loaded("person", replace(STREAMS, seed=seed)).tokens_per_second


COLUMNS = ("measured", "value", "goal")


def pace_rows(found: KeptPace) -> Iterator[Row]:
    yield (
        "first token next to agents and a batch, times alone (p95)",
        f"{found.first_token:.2f}",
        "1.10",
    )
    yield "speed, share of alone (p5)", f"{found.speed:.2f}", "0.90"
    yield "batch, share of its speed alone in what time is left", f"{found.batch:.2f}", "0.90"


def batch_rows(found: BatchCost) -> Iterator[Row]:
    batch, direct = found.batch, found.direct
    yield f"lines a second, of {found.lines}", f"{found.lines / batch.seconds:.0f}", ""
    yield f"requests a second of {CLIENTS} clients", f"{found.lines / direct.seconds:.0f}", ""
    for name, use in (("line", batch), ("request", direct)):
        yield f"processor time a {name}, ms", f"{1000 * use.processor / found.lines:.2f}", ""
    yield "the server's memory, MB more", f"{(found.peak - found.memory) / 1e6:.1f}", ""


def stream_rows(found: StreamsBeside) -> Iterator[Row]:
    yield "speed of 4 streams next to a training, share of alone", f"{found.speed:.2f}", "0.90"
    yield "processors that the training takes meanwhile", f"{found.trainer:.2f}", "0"
    loss = f"{found.base:.3f} -> {found.adapter:.3f}"
    yield f"held-out loss {loss}, share", f"{found.adapter / found.base:.2f}", "0.80"
    served = "yes" if found.is_served else found.error or "no"
    yield "the adapter is served without a restart", served, "yes"
