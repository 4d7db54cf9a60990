"""Streams of every kind while their engine is killed again and again: `scripts/chaos`."""

import json
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import psutil
import typer

from mlx_server.system import handover
from mlx_server.system.servers import FOLDER
from tests.hostile.wounds import IGNORED, NO_MEMORY, Knife, knife
from tests.live.server import (
    DEMO,
    DEMO_MODEL,
    PLAIN,
    SAMPLES,
    LiveServer,
    children,
    eventually,
    is_engine,
    serving,
)
from tests.tiny import tiny_embedder, tiny_llama, tiny_reranker
from tests.worker.kinds import KINDS
from tests.worker.lora_files import mlx_adapter

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA, COMPLETIONS = "/api/chat", "/v1/completions"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "sizes": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}

DRAWN: dict[str, Any] = {"temperature": 1, "seed": 3}


def streams(tokens: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """The route and the body of each kind of stream, but for its model and its question."""
    length = {"max_tokens": tokens}
    chat: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "seeded": DRAWN,
        "penalties": {**DRAWN, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        "schema": {**DRAWN, "response_format": FORMAT},
        "tools": {**DRAWN, "tools": [TOOL], "tool_choice": "required"},
        "thinking budget": {**DRAWN, "thinking_budget": tokens // 3},
        "log probabilities": {"temperature": 0, "logprobs": True, "top_logprobs": 3},
        "stop strings": {**DRAWN, "stop": ["zq", "Zq"]},
        "n of 2": {**DRAWN, "n": 2},
        "adapter": {**DRAWN, "adapter": "x"},
        "JSON object": {**DRAWN, "response_format": {"type": "json_object"}},
    }
    usage = {"stream_options": {"include_usage": True}}
    kinds = {name: (CHAT, {**length, **usage, **body}) for name, body in chat.items()}
    return {
        **kinds,
        "completion": (COMPLETIONS, {**length, **DRAWN, "echo": True, "logprobs": 1}),
        "response": (RESPONSES, {"max_output_tokens": tokens, "temperature": 0}),
        "message": (MESSAGES, {**length, "temperature": 0}),
        "Ollama": (OLLAMA, {"options": {"num_predict": tokens, "temperature": 0}}),
        "embeddings": (EMBEDDINGS, {}),
        "rerank": (RERANK, {}),
    }


PIECES = [("The sea and the hills and the town. " * 4)[:length] for length in range(1, 60)]


def asked(kind: str, model: str, tokens: int) -> tuple[str, dict[str, Any]]:
    route, body = streams(tokens)[kind]
    text = f"Tell me {kind} about the sea and the hills, the {model} and the town. " * 4
    said: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if route == RESPONSES:
        said = {"input": text}
    if route == COMPLETIONS:
        said = {"prompt": text}
    if route == EMBEDDINGS:
        return route, {"model": model, "input": PIECES}
    if route == RERANK:
        return route, {"model": model, "query": "Is it the sea?", "documents": PIECES}
    return route, {"model": model, "stream": True, **said, **body}


OWN = re.compile(
    r'"(?:id|item_id|response_id|call_id|created|created_at|completed_at|cached_tokens|'
    r"cache_read_input_tokens|input_tokens|input_tokens_details|total_duration|load_duration|"
    r'prompt_eval_duration|eval_duration|obfuscation|sequence_number)":(?:"[^"]*"|[\d.]+)'
)
WAITING = ("response.in_progress", "event: ping", '"ping"}', '"content":""},"done":false')
"""Of the events that fill a long wait; Ollama's are messages without text."""

NUMBER = re.compile(r"-?\d+\.\d{3,}")


def normalised(stream: str) -> str:
    """The stream without what no two answers share: ids, times, and what a cache had."""
    lines = [line for line in stream.splitlines() if line and not line.startswith(":")]
    events = [line for line in lines if not any(each in line for each in WAITING)]
    events.sort(key=lambda line: re.findall(r'"choices":\[{"index":(\d)', line))  # of n answers
    return OWN.sub("", "\n".join(events))


def is_same(one: str, other: str) -> bool:
    """Byte for byte, but for the rounding of log probabilities, which other batches have too."""
    numbers = zip(NUMBER.findall(one), NUMBER.findall(other), strict=False)
    near = all(abs(float(a) - float(b)) < 1e-3 for a, b in numbers)
    return near and NUMBER.sub("", one) == NUMBER.sub("", other)


STARVED = "starved"
"""The engine gets a tenth of a processor for some seconds."""

WOUNDS = {"memory that ran out": NO_MEMORY, "a GPU that was lost": IGNORED}
"""Of the first the engine goes on; the second time in a row it ends."""

WAYS = ("SIGKILL", "SIGKILL", "SIGSTOP", "SIGSEGV", STARVED, *WOUNDS)


@dataclass
class Chaos:
    server: LiveServer
    knife: Knife
    models: Sequence[str]
    tokens: int
    expected: dict[tuple[str, str], str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    answers: int = 0
    kills: int = 0
    pauses: list[float] = field(default_factory=list)
    """Seconds without an event of streams that were under way at a kill."""
    begun: list[float] = field(default_factory=list)
    """Seconds to the first event of requests that were sent within 3 s of a kill."""
    killed_at: list[float] = field(default_factory=list)
    restarts: int = 0
    """How many of the kills are restarts of the server."""
    ways: Counter[str] = field(default_factory=Counter)
    """How often the engine ended in each way."""
    grown: list[str] = field(default_factory=list)
    """What the server's process had before, and after each quarter of the kills."""
    came: dict[int, float] = field(default_factory=dict)
    """When each answer under way was sent or had its last event, by a number of its own."""

    @property
    def kinds(self) -> list[tuple[str, str]]:
        return [
            (kind, model) for model in self.models for kind in streams(1) if self._can(kind, model)
        ]

    def _can(self, kind: str, model: str) -> bool:
        of_one = {each: each for each in ("embeddings", "rerank")} | {"thinking budget": "thinker"}
        if kind in of_one or model in of_one.values():
            return of_one.get(kind) == model
        return kind != "adapter" or model in ("llama", DEMO)

    def answer(self, kind: str, model: str) -> str:
        route, body = asked(kind, model, self.tokens)
        pieces, sent = [], time.monotonic()
        last, longest, own = sent, 0.0, threading.get_ident()
        self.came[own] = sent
        with (
            httpx.Client(**PLAIN, base_url=self.server.url, timeout=120) as http,
            http.stream("POST", route, json=body) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            for piece in answer.iter_text():
                pieces.append(piece)
                if "data:" in piece or route == OLLAMA:
                    now = time.monotonic()
                    if last == sent and any(0 < sent - at < 3 for at in self.killed_at):
                        self.begun.append(now - sent)
                    if last != sent and any(last < at < now for at in self.killed_at):
                        longest = max(longest, now - last)
                    last = self.came[own] = now
        if longest:
            self.pauses.append(longest)
        return "".join(pieces)

    def learn(self, clients: int) -> None:
        with ThreadPoolExecutor(clients) as threads:
            answers = threads.map(lambda each: normalised(self.answer(*each)), self.kinds)
            self.expected = dict(zip(self.kinds, answers, strict=True))
        self.came.clear()

    def ask(self, number: int) -> None:
        chance = random.Random(number)
        kind, model = chance.choice(self.kinds)
        try:
            came = normalised(self.answer(kind, model))
        except (httpx.HTTPError, AssertionError) as error:
            came = f"lost: {type(error).__name__} {error}"
        self.came.pop(threading.get_ident(), None)
        self.answers += 1
        if not is_same(came, self.expected[kind, model]):
            wanted = self.expected[kind, model]
            at = next(
                (i for i, (a, b) in enumerate(zip(came, wanted, strict=False)) if a != b),
                min(len(came), len(wanted)),
            )
            self.wrong.append(
                f"{kind} of {model} (number {number}) differs at {at}: "
                f"{came[max(0, at - 150) : at + 250]!r} for {wanted[max(0, at - 150) : at + 250]!r}"
            )

    def kill(self, times: int, seed: int, over: threading.Event, restarting: float) -> None:
        chance = random.Random(seed)
        try:
            while self.kills < times and not over.is_set():
                eventually(self.server.is_healthy, "an engine runs", seconds=120)
                # a request that has had no token of an engine when it ends is thought to be why
                eventually(self.all_go_on, "all have gone on", seconds=120)
                over.wait(chance.uniform(0.2, 4.0))
                if chance.random() < restarting:
                    self.restart()
                else:
                    self.kill_engine(chance)
                if self.kills * 4 >= times * len(self.grown) and not self.restarts:
                    self.grown.append(used(self.server))
                if self.kills % 10 == 0:
                    print(f"{self.kills} times, {self.answers} answers, {len(self.wrong)} wrong")
        finally:
            over.set()

    def all_go_on(self) -> bool:
        last = self.killed_at[-1] if self.killed_at else 0.0
        return all(came > last for came in [*self.came.values()])

    def restart(self) -> None:
        self.killed_at.append(time.monotonic())
        first = self.server.process.pid
        handover.ask(self.server.log_file.parent / "data" / FOLDER, first)
        self.kills += 1
        self.restarts += 1

    def kill_engine(self, chance: random.Random) -> None:
        found = [each for each in children(self.server.process.pid) if is_engine(each)]
        how = chance.choice(WAYS)
        with suppress(psutil.NoSuchProcess, IndexError):
            engine = found[-1]  # after a restart there may be that of the old one too
            if how == STARVED:
                for _ in range(20):
                    engine.suspend()
                    time.sleep(0.18)
                    engine.resume()
                    time.sleep(0.02)
            elif how in WOUNDS:
                self.knife.strike("compute", WOUNDS[how])
            else:
                engine.send_signal(signal.Signals[how])
            self.killed_at.append(time.monotonic())
            self.kills += 1
            self.ways[how] += 1

    def rage(self, times: int, clients: int, seed: int, restarting: float) -> None:
        over = threading.Event()

        def client(first: int) -> None:
            number = first
            while not over.is_set():
                self.ask(number)
                number += clients

        with ThreadPoolExecutor(clients + 1) as threads:
            each = [threads.submit(client, seed + at) for at in range(clients)]
            each.append(threads.submit(self.kill, times, seed, over, restarting))
            for one in each:
                one.result()


def configuration(folder: Path, *, demo: bool) -> dict[str, Any]:
    llama = tiny_llama(folder / "llama")
    models: dict[str, Any] = {
        "llama": {
            "source": str(llama),
            "adapters": {"x": {"path": str(mlx_adapter(folder / "x", llama))}},
        },
    }
    for kind in ("gpt_oss", "qwen3_5"):
        path = KINDS[kind].save(folder / kind)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (path / name).write_bytes((llama / name).read_bytes())
        models[kind] = {"source": str(path), "family": "smollm2"}
    thinker = tiny_llama(folder / "thinker")
    settings = json.loads((thinker / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{% if add_generation_prompt %}<think>{% endif %}"
    (thinker / "tokenizer_config.json").write_text(json.dumps(settings))
    models["thinker"] = {"source": str(thinker)}
    models["embeddings"] = {"source": str(tiny_embedder(folder / "embedder"))}
    models["rerank"] = {"source": str(tiny_reranker(folder / "reranker"))}
    if demo:
        models[DEMO] = {**DEMO_MODEL, "adapters": {"x": {"path": str(next(SAMPLES.iterdir()))}}}
    return {"server": {"log_level": "info"}, "models": models}


def raged(
    folder: Path,
    *,
    kills: int,
    clients: int,
    tokens: int,
    seed: int,
    restarting: float = 0.0,
    demo: bool = False,
    models: Sequence[str] = (),
) -> Chaos:
    """models: those that are asked; by default all. restarting: the share of the kills that are
    restarts of the server."""
    config = configuration(folder, demo=demo)
    with knife(folder / "knife") as wounding, serving(folder, config) as server:
        chaos = Chaos(server, wounding, models or [*config["models"]], tokens)
        chaos.learn(clients)
        chaos.grown.append(used(server))
        chaos.rage(kills, clients, seed, restarting)
    return chaos


def used(server: LiveServer) -> str:
    process = psutil.Process(server.process.pid)
    megabytes = process.memory_info().rss / 1e6
    return f"{megabytes:.0f} MB, {process.num_fds()} descriptors, {process.num_threads()} threads"


def main(
    kills: Annotated[int, typer.Option(min=1, help="How often the engine ends.")] = 200,
    clients: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 60,
    seed: int = 0,
    restarts: Annotated[
        float, typer.Option(min=0, max=1, help="Share of them that replace the server instead.")
    ] = 0.0,
    demo: Annotated[bool, typer.Option("--demo", help="The demo model too.")] = False,
) -> None:
    """Kills, stops and crashes the engine at random moments while streams of every kind run, and
    compares each with an undisturbed one. Fails if one is lost or has another byte."""
    with TemporaryDirectory() as name:
        chaos = raged(
            Path(name),
            kills=kills,
            clients=clients,
            tokens=tokens,
            seed=seed,
            restarting=restarts,
            demo=demo,
        )
    print(*chaos.wrong[:8], sep="\n")
    codes = Counter(re.findall(r'"code": ?"(\w+)"', " ".join(chaos.wrong)))
    print(*(f"{count} {code}" for code, count in codes.items()), sep=", ")
    what = f"{chaos.kills - chaos.restarts} kills, {chaos.restarts} restarts"
    print(f"{what}, {chaos.answers} answers, {len(chaos.wrong)} lost or different")
    print(*(f"{how}: {times}" for how, times in chaos.ways.items()), sep=", ")
    print("the server had, at each quarter until it was replaced", *chaos.grown, sep=" | ")
    if chaos.pauses:
        longest = f"median {median(chaos.pauses):.2f} s, most {max(chaos.pauses):.2f} s"
        print(f"{len(chaos.pauses)} pauses: {longest}")
    if chaos.begun:
        p95 = sorted(chaos.begun)[int(0.95 * (len(chaos.begun) - 1))]
        print(f"{len(chaos.begun)} began within 3 s of a kill: p95 {p95:.2f} s")
    raise typer.Exit(bool(chaos.wrong))


if __name__ == "__main__":
    typer.run(main)
