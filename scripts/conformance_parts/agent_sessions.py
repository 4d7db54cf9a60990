"""`python -m conformance_parts.agent_sessions CLIENT FOLDER`, in a network of its own.

FOLDER has the client's program. It gets its files from `mlx-server connect --write`, in a home
folder of its own, and talks with a replay model. A line of JSON, a name and an error, is printed
for each session.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conformance_parts.agents import AGENTS
from conformance_parts.namespaces import raise_loopback
from mlx_server.clients.connect.clients import CLIENTS
from tests.live.server import LiveServer, serving

MODEL, SHORT = "talker", "short"
CONTEXT, TOO_SHORT = 400_000, 2_000
SECONDS = 180.0
FILE = "made.txt"
SAID, WRITTEN, CONTENT = "All is well here.", "The file is there.", "made by a tool"
ASKED, TO_WRITE = "How are things?", "Write the file now."


@dataclass(frozen=True)
class Session:
    client: str
    folder: Path
    server: LiveServer
    home: Path

    @property
    def work(self) -> Path:
        return self.home / "work"

    def connect(self, model: str) -> None:
        command = [sys.executable, "-m", "mlx_server", "connect", self.client, "--write"]
        arguments = ["--url", self.server.url, "--model", model]
        done = self._run([*command, *arguments])
        assert done.returncode == 0, done.stderr

    def ask(self, prompt: str, model: str = MODEL) -> subprocess.CompletedProcess[str]:
        program = CLIENTS[self.client].command[0]
        values = {"{prompt}": prompt, "{model}": model}
        arguments = [values.get(each, each) for each in AGENTS[self.client].arguments]
        return self._run([str(self.folder / program), *arguments])

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "HOME": str(self.home),
            "PWD": str(self.work),
            "XDG_CONFIG_HOME": str(self.home / ".config"),
            "TERM": "dumb",
        }
        return subprocess.run(
            command,
            cwd=self.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )


def answers(session: Session) -> None:
    session.connect(MODEL)
    done = session.ask(ASKED)
    assert SAID in done.stdout, done.stdout[-300:] + done.stderr[-300:]


def writes(session: Session) -> None:
    session.connect(MODEL)
    done = session.ask(TO_WRITE)
    made = session.work / FILE
    assert made.is_file(), done.stdout[-300:] + done.stderr[-300:]
    assert made.read_text("utf-8").strip() == CONTENT
    assert WRITTEN in done.stdout, done.stdout[-300:]


def overflows(session: Session) -> None:
    """The client knows it by its words, and ends."""
    session.connect(SHORT)
    asked = "How are things? " * 200
    done = session.ask(asked, SHORT)
    said, words = done.stdout + done.stderr, AGENTS[session.client].overflow
    if words is None:
        summed_up = [line for line in session.server.log.splitlines() if f"{SHORT} (" in line]
        assert any(" 200 " in line for line in summed_up), said[-300:]
    else:
        assert words in said, said[-300:]


def sessions(client: str) -> Iterator[tuple[str, Callable[[Session], None]]]:
    yield "an answer", answers
    if AGENTS[client].call:
        yield "a file written by a tool", writes
    yield "an overflow", overflows


def transcript(client: str, work: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"match": "regex:How are things", "output": SAID}]
    if call := AGENTS[client].call:
        name, given = call
        values = {"{file}": str(work / FILE), "{content}": CONTENT}
        made = {"name": name, "arguments": {key: values[value] for key, value in given.items()}}
        written = f"<tool_call>\n{json.dumps(made)}\n</tool_call>"
        found += [{"match": "regex:Write the file", "output": text} for text in (written, WRITTEN)]
    return [*found, {"output": SAID}]


def main(client: str, folder: str) -> None:
    raise_loopback()
    with TemporaryDirectory() as place:
        home = Path(place) / "home"
        (home / "work").mkdir(parents=True)
        os.environ["MLX_SERVER_CACHE"] = str(Path(place) / "cache")
        entries = "\n".join(map(json.dumps, transcript(client, home / "work")))
        (Path(place) / "said.jsonl").write_text(entries, "utf-8")
        replay = {"source": "replay:said.jsonl", "family": "qwen3"}
        models = {
            MODEL: {**replay, "context_length": CONTEXT},
            SHORT: {**replay, "context_length": TOO_SHORT},
        }
        with serving(Path(place), {"models": models}) as server:
            session = Session(client, Path(folder), server, home)
            for name, run in sessions(client):
                sys.stdout.write(json.dumps([name, _error(run, session)]) + "\n")
                sys.stdout.flush()


def _error(run: Callable[[Session], None], session: Session) -> str:
    try:
        run(session)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
