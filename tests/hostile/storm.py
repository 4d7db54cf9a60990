"""Everything at once for a given time, next to a control client: `scripts/soak --storm SECONDS`.

Clients of every bad kind ask one server: they alternate between models that do not fit into memory
together, load and unload adapters, reset connections at random bytes, read a byte a second, and
the engine is killed or stopped now and then. The control client asks the same questions over and
over; its tokens may not change.
"""

import json
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import httpx
import psutil

from mlx_server import limits
from tests.hostile.inside import request, reset
from tests.hostile.shapes import CHAT, Client, UnexpectedStatus
from tests.hostile.soak import Held, connected, held, soaked
from tests.live.server import LiveServer, children, eventually, serving

CLIENTS = 2
"""Threads of each kind."""

KILL_SECONDS = 20.0, 40.0
"""The shortest and the longest time between two deaths of the engine."""

UNAVAILABLE = 503
BROKEN = "500"
RETRIES = 100
RETRY_SECONDS = 0.2
MORE_FILES = 8
"""Descriptors that a server may have more of after the storm than before it."""

QUESTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 1.2, "seed": 7, "max_tokens": 24},
    {"temperature": 0, "max_tokens": 16, "adapter": "x"},
    {"temperature": 0.8, "seed": 3, "max_tokens": 32, "response_format": {"type": "json_object"}},
)


@dataclass
class Storm:
    server: LiveServer
    seconds: float
    seed: int
    over: Event = field(default_factory=Event)
    seen: Counter[str] = field(default_factory=Counter)
    """What came of requests, by kind of client."""
    wrong: list[str] = field(default_factory=list)

    def blow(self) -> None:
        expected = [self.answer(question) for question in QUESTIONS]
        kinds = (self.shapes, self.swaps, self.cuts, self.slow, self.loads)
        clients = [(kind, number) for kind in kinds for number in range(CLIENTS)]
        with ThreadPoolExecutor(len(clients) + 2) as threads:
            blowing = [
                threads.submit(self._repeat, kind, 100 * number + at)
                for at, (kind, number) in enumerate(clients)
            ]
            blowing.append(threads.submit(self._kill))
            blowing.append(threads.submit(self._control, expected))
            self.over.wait(self.seconds)
            self.over.set()
            for each in blowing:
                each.result()

    def _repeat(self, kind: Callable[[httpx.Client, random.Random], str], seed: int) -> None:
        chance = random.Random(self.seed + seed)
        while not self.over.is_set():
            try:
                came = kind_of(kind, self.server.url, chance)
            except (httpx.TransportError, OSError) as error:
                came = type(error).__name__
            except UnexpectedStatus as error:
                came = str(error.status)
                if error.status != UNAVAILABLE:  # which it is while the engine starts again
                    self.wrong.append(f"{kind.__name__} was answered with {error}")
            self.seen[f"{kind.__name__}: {came}"] += 1
            if came.startswith(BROKEN):
                self.wrong.append(f"{kind.__name__} was answered with {came}")

    def shapes(self, http: httpx.Client, chance: random.Random) -> str:
        Client(http, chance.randrange(10**9)).send()
        return "as expected"

    def swaps(self, http: httpx.Client, chance: random.Random) -> str:
        return status(http.post(CHAT, json=asked("b", chance, max_tokens=8)))

    def loads(self, http: httpx.Client, chance: random.Random) -> str:
        """An adapter of a client's own, which is asked for while others take it away."""
        adapter = {"lora_name": "z", "lora_path": str(self.adapter), "model": "a"}
        kind = chance.choice(("load", "unload", "ask"))
        if kind == "ask":
            return status(http.post(CHAT, json=asked("a", chance, adapter="z", max_tokens=4)))
        return status(http.post(f"/v1/{kind}_lora_adapter", json=adapter))

    @property
    def adapter(self) -> Path:
        return self.server.log_file.parent / "x"

    def cuts(self, http: httpx.Client, chance: random.Random) -> str:
        """A reset at some byte of the request, or of the answer."""
        sent = request(CHAT, asked("a", chance, stream=True, max_tokens=64))
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as line:
            whole = chance.random() < 0.7
            line.sendall(sent if whole else sent[: chance.randrange(len(sent))])
            for _ in range(chance.randrange(4) if whole else 0):
                line.recv(1 + chance.randrange(400))
            reset(line)
        return "reset"

    def slow(self, http: httpx.Client, chance: random.Random) -> str:
        with http.stream("POST", CHAT, json=asked("a", chance, stream=True, n=4)) as answer:
            if not answer.is_success:
                return status(answer)
            for at, _ in enumerate(answer.iter_raw(16)):
                if at > 4 or self.over.wait(1.0):
                    break
        return str(answer.status_code)

    def _kill(self) -> None:
        chance = random.Random(self.seed)
        while not self.over.wait(chance.uniform(*KILL_SECONDS)):
            with suppress(psutil.NoSuchProcess, ValueError):  # it is being started again
                engine = self.server.engine
                engine.send_signal(chance.choice((signal.SIGKILL, signal.SIGSTOP)))
                self.seen["the engine: killed or stopped"] += 1

    def _control(self, expected: list[str]) -> None:
        while not self.over.is_set():
            for question, answer in zip(QUESTIONS, expected, strict=True):
                if (found := self.answer(question)) != answer:
                    self.wrong.append(f"{question} gave {found!r}, and {answer!r} before")
                self.seen["control: the same tokens"] += found == answer

    def answer(self, question: dict[str, Any]) -> str:
        """Asked again while there is no engine, as an SDK does."""
        body = asked("a", random.Random(1), **question)
        for _ in range(RETRIES):
            with connected(self.server.url) as http:
                answer = http.post(CHAT, json=body)
            if answer.status_code != UNAVAILABLE:
                return said(answer)
            time.sleep(RETRY_SECONDS)
        return "no answer"


def kind_of(
    kind: Callable[[httpx.Client, random.Random], str], url: str, chance: random.Random
) -> str:
    with connected(url) as http:
        return kind(http, chance)


def asked(model: str, chance: random.Random, **more: Any) -> dict[str, Any]:
    text = "".join(chance.choices("abcdefgh ", k=chance.choice((5, 50, 400))))
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def status(answer: httpx.Response) -> str:
    """With the error, where the server could not answer."""
    found = str(answer.status_code)
    return f"{found} {answer.read().decode()}" if found == BROKEN else found


def said(answer: httpx.Response) -> str:
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text}"
    choice = answer.json()["choices"][0]
    return json.dumps([choice["message"]["content"], choice["finish_reason"]])


def left_over(before: Held, after: Held) -> list[str]:
    found = []
    if after.files > before.files + MORE_FILES:
        found.append(f"{after.files - before.files} more descriptors are open")
    if after.children > before.children:
        found.append(f"{after.children - before.children} more child processes run")
    return found


def broken(log: str) -> list[str]:
    """The log's records of errors that have a traceback."""
    return re.findall(r"^\S+ \S+ ERROR .*\n(?:(?!\d{4}-)\S? *\S.*\n)+", log, re.MULTILINE)


def storm(seconds: float, seed: int) -> list[str]:
    """What went wrong; prints what came of all requests."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = soaked(folder)
        config["server"] |= {"adapter_dirs": [name]}
        with serving(folder, config) as server:
            blown = Storm(server, seconds, seed)
            blown.answer(QUESTIONS[0])
            eventually(server.idle, "nothing is asked of it yet")
            # one that renders is warm; as many as may be stay so, with a socket each
            found, more = held(server), limits.IDLE_TEMPLATE_PROCESSES - 1
            before = replace(found, children=found.children + more, files=found.files + more)
            blown.blow()
            eventually(server.is_healthy, "the engine runs again", seconds=60)
            eventually(server.idle, "nothing is asked of it any more", seconds=60)
            eventually(lambda: len(children(server.process.pid)) <= before.children, "no more run")
            wrong = [*blown.wrong, *left_over(before, held(server)), *broken(server.log)]
    for what, times in sorted(blown.seen.items()):
        print(f"{times:8}  {what}")
    return wrong
