"""Sessions of several turns, thousands of them, and the limits of the prompt cache in memory and
on disk: `scripts/soak --sessions`."""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from mlx_server.worker.prefill.disk_tier import IDLE_SECONDS
from tests.hostile.shapes import CHAT, WORDS
from tests.hostile.soak import AT_ONCE, GROWTH, HEADINGS, Held, connected, held
from tests.live.server import LiveServer, eventually, serving
from tests.tiny import tiny_llama
from tests.worker.kinds import KINDS

Json = dict[str, Any]

MEMORY, DISK = 3_000_000, 6_000_000
"""Bytes for prompts: those of some ten sessions, and of twenty."""

SESSIONS_BETWEEN, PAUSE_SECONDS = 20, IDLE_SECONDS + 0.3
"""After so many sessions there is a pause in which prompts are written to disk."""

BATCHES = 8
"""What is held after half of the sessions is compared with what is held at the end: the heap of the
engine finds its size only after some hundreds of them."""

SYSTEMS, SYSTEM_WORDS, WORDS_OF_TURN = 3, 60, (5, 80)
TURNS = 3


def saved(kind: str, folder: Path) -> Path:
    """A checkpoint of this kind, with the tokenizer and the template of the tiny llama."""
    named = next(each for each in KINDS if each.name == kind)
    path, files = named.save(folder / kind), tiny_llama(folder / "files")
    for file in files.iterdir():
        if not (path / file.name).exists():
            shutil.copy(file, path)
    return path


def config(folder: Path, kind: str) -> Json:
    cache = {"memory": MEMORY, "disk": DISK}
    return {
        "server": {"log_level": "warning", "prompt_cache": cache},
        "store": {"data_dir": str(folder / "store")},
        "models": {"a": {"source": str(saved(kind, folder)), "family": "plain"}},
    }


def turns(seed: int) -> Iterator[list[Json]]:
    """The messages of each request of a session. Sessions share a few system prompts."""
    random = Random(seed)
    system = _words(Random(seed % SYSTEMS), SYSTEM_WORDS)
    messages: list[Json] = [{"role": "system", "content": system}]
    for _ in range(random.randint(1, TURNS)):
        messages.append({"role": "user", "content": _words(random, random.randint(*WORDS_OF_TURN))})
        yield messages


def _words(random: Random, count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))


def ask(http: httpx.Client, seed: int) -> list[str]:
    """A whole session; what the model said."""
    said = []
    for messages in turns(seed):
        body = {"model": "a", "messages": messages, "max_tokens": 4, "temperature": 0}
        answer = http.post(CHAT, json=body)
        answer.raise_for_status()
        said.append(answer.json()["choices"][0]["message"]["content"] or "")
        messages.append({"role": "assistant", "content": said[-1]})
    return said


class Watch:
    """The most that the prompt cache took after any of the sessions."""

    def __init__(self, server: LiveServer, folder: Path) -> None:
        self._server, self._folder = server, folder
        self.memory = self.disk = 0

    def session(self, seed: int) -> None:
        with connected(self._server.url) as http:
            ask(http, seed)
            pool = http.get("/v1/pool").json()
        self.memory = max(self.memory, pool["memory"]["prompt_cache"])
        self.disk = max(self.disk, on_disk(self._folder))

    def sessions(self, seeds: range) -> Held:
        for start in range(seeds.start, seeds.stop, SESSIONS_BETWEEN):
            some = range(start, min(start + SESSIONS_BETWEEN, seeds.stop))
            with ThreadPoolExecutor(AT_ONCE) as threads:
                list(threads.map(self.session, some))
            eventually(self._server.idle, "nothing is asked of it any more")
            time.sleep(PAUSE_SECONDS)
            self.disk = max(self.disk, on_disk(self._folder))
        return held(self._server)


def on_disk(folder: Path) -> int:
    nbytes = 0
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):  # some are removed meanwhile
            nbytes += entry.stat().st_blocks * 512
    return nbytes


def soak_sessions(count: int, seed: int, kind: str) -> list[str]:
    """What was wrong."""
    with TemporaryDirectory() as name, serving(Path(name), config(Path(name), kind)) as server:
        watch, seen = Watch(server, Path(name) / "store" / "prompts"), []
        with connected(server.url) as http:
            cold = ask(http, -1)
            print(f"{HEADINGS}  in memory   on disk  (MB, the most of prompts)")
            for batch in range(BATCHES):
                start, stop = (part * count // BATCHES for part in (batch, batch + 1))
                seen.append(watch.sessions(range(seed + start, seed + stop)))
                sizes = f"{watch.memory / 1e6:11.2f}{watch.disk / 1e6:10.2f}"
                print(f"{stop:8}{seen[-1]}  {sizes}", flush=True)
            again = ask(http, -1)
        written = server.counted("mlx_server_disk_cache_written_bytes_total")
        hits = server.counted("mlx_server_disk_cache_hits_total")
    print(f"{written / 1e6:.1f} MB were written, {hits:.0f} prompts began with files")
    first, last = seen[BATCHES // 2 - 1], seen[-1]
    wrong = {
        f"{watch.memory} bytes of prompts in memory": watch.memory > MEMORY,
        f"{watch.disk} bytes of prompts on disk": watch.disk > DISK,
        "too little was written for the limit to matter": written < 2 * DISK,
        "the server grew": last.server > first.server * (1 + GROWTH),
        "the engine grew": last.engine > first.engine * (1 + GROWTH),
        f"{last.files} open files, {first.files} at first": last.files > first.files,
        "the same session had other answers": again != cold,
    }
    return [what for what, is_so in wrong.items() if is_so]
