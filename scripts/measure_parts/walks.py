"""Counts the files that data crosses on its way, by requests to a real server whose calls are
written down, those of its children and of the engine too.

A walk has the files whose functions run for one request and not for another one, which lacks what
walks.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, Literal

import httpx
from bench_parts.contenders import SAMPLES, answering
from bench_parts.models import model_folder

SITE = Path(__file__).parent / "site"
ROOT = Path(__file__).parents[2]
LIBRARY = f"{ROOT / 'mlx_server'}{os.sep}"
ENGINE, TAKEN = "worker/", ("worker/engine.py", "handle")
TOKENIZER = "models/tokenizer_child.py"
HUB_NAME = "walks/tiny"

Part = Literal["all", "until there are ids", "after the engine begins", "between two chunks"]
BETWEEN = (10, 40)
"""The numbers of the chunks between which a stream is measured."""
IDLE_SECONDS = 3
"""What runs by the clock is not part of a walk."""
MARK = "read until here\n"
Body = dict[str, Any]


@dataclass(frozen=True)
class Walk:
    name: str
    most: int
    route: str
    body: Body
    without: Body
    """The members of the body with which nothing walks."""
    part: Part = "all"


WEATHER: Body = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
}
FORMAT: Body = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}
TOOL: Body = {"type": "function", "name": "weather", "parameters": WEATHER}
CALL: Body = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 100}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"

REQUESTS: dict[str, Callable[[str], Body]] = {
    CHAT: lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 60},
    RESPONSES: lambda text: {"input": text, "max_output_tokens": 60},
}
WALKS = (
    Walk("prompt to ids", 22, CHAT, {}, {"model": "nothing"}, "until there are ids"),
    Walk("token to SSE", 22, CHAT, {"stream": True}, {}, "between two chunks"),
    Walk("adapter to matmul", 22, CHAT, {"adapter": "pirate"}, {}),
    Walk("schema to mask", 26, CHAT, {"response_format": FORMAT}, {}),
    Walk("tool call to item", 22, RESPONSES, CALL, {}, "after the engine begins"),
    Walk("hub name to weights", 22, CHAT, {"model": HUB_NAME}, {"model": HUB_NAME}),
)


class Calls:
    """What all processes write down, in order."""

    def __init__(self, folder: Path) -> None:
        os.mkfifo(folder / "calls")
        self._pipe = os.open(folder / "calls", os.O_RDWR)
        self._lines: list[str] = []
        self._read = Event()
        Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        with os.fdopen(self._pipe) as pipe:
            for line in pipe:
                if line == MARK:
                    self._read.set()
                else:
                    self._lines.append(line)

    def of(self, stretch: int) -> list[tuple[str, str]]:
        """The files and names of the functions that ran in a stretch, in order."""
        self._read.clear()
        os.write(self._pipe, MARK.encode())
        self._read.wait()
        lines = (line.split() for line in self._lines)
        return [(file, name) for number, file, name in lines if int(number) == stretch]


class Server:
    def __init__(self, url: str, folder: Path, calls: Calls) -> None:
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=60)
        self._number, self._calls = count(), calls
        self._file = (folder / "stretch").open("r+b", buffering=0)
        self.stretch = 0

    def begin(self) -> None:
        self.stretch += 1
        self._file.seek(0)
        self._file.write(bytes([self.stretch]))

    def ask(self, route: str, body: Body) -> None:
        text = f"Tell me about the number {next(self._number)}."  # no prompt is in the cache
        whole = {"model": "demo", **REQUESTS[route](text), **body}
        if not whole.get("stream"):
            answer = self._http.post(route, json=whole)
            assert answer.is_success or whole["model"] == "nothing", answer.text
            return
        with self._http.stream("POST", route, json=whole) as response:
            for number, _ in enumerate(response.iter_raw()):
                if number in BETWEEN:
                    self.begin()

    def files(self, stretch: int, part: Part) -> set[str]:
        calls = self._calls.of(stretch)
        taken = calls.index(TAKEN) if TAKEN in calls else len(calls)
        files = [file for file, _ in calls]
        if part == "until there are ids":
            made = [at for at, file in enumerate(files[:taken]) if file == TOKENIZER]
            return set(files[: made[-1] + 1] if made else files)
        if part == "after the engine begins":
            return {file for file in files[taken:] if not file.startswith(ENGINE)}
        return set(files)

    def walk(self, walk: Walk) -> set[str]:
        if walk.body != walk.without:
            self.ask(walk.route, walk.without)
        self.begin()
        self.ask(walk.route, walk.body)
        crossed = self.stretch - (walk.part == "between two chunks")
        self.begin()
        time.sleep(IDLE_SECONDS)
        if walk.part != "between two chunks":
            self.ask(walk.route, walk.without)
        return self.files(crossed, walk.part) - self.files(self.stretch, walk.part)


@contextmanager
def _server() -> Iterator[Server]:
    demo = model_folder("demo")
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stretch").write_bytes(b"\0")
        calls = Calls(folder)
        adapter = {"path": str(SAMPLES / "pirate"), "allow_other_base": True}
        models = {"demo": {"source": str(demo), "adapters": {"pirate": adapter}}}
        models[HUB_NAME] = {"source": HUB_NAME}
        settings = {"server": {"adapter_dirs": [str(SAMPLES)]}, "models": models}
        config = folder / "models.yaml"
        config.write_text(json.dumps(settings))  # YAML includes JSON
        variables = {
            "PYTHONPATH": str(SITE),
            "MLX_SERVER_DATA": name,
            "MLX_WALKS": name,
            "MLX_WALKS_LIBRARY": LIBRARY,
            "HF_HOME": str(_hub(folder / "hub", model_folder("tiny"))),
        }
        command = ["mlx_server", "serve", "--config", str(config), "--log-level", "error"]
        with answering(command, "demo", demo, variables) as (_, target):
            yield Server(target.url, folder, calls)


def _hub(home: Path, checkpoint: Path) -> Path:
    """Makes the hub's cache, with one model."""
    model = home / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("0" * 40)
    shutil.copytree(checkpoint, model / "snapshots" / ("0" * 40))
    return home


def main() -> int:
    over = False
    with _server() as server:
        for route in REQUESTS:  # what is done only once is none of a walk
            server.ask(route, {})
        for walk in WALKS:
            files = server.walk(walk)
            over = over or len(files) > walk.most
            sys.stdout.write(f"{walk.name:20} {len(files):>3} files, at most {walk.most}\n")
            sys.stdout.writelines(f"    {file}\n" for file in sorted(files))
    return over


if __name__ == "__main__":
    sys.exit(main())
