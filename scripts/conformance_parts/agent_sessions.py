"""`python -m conformance_parts.agent_sessions CLIENT FOLDER`, in a network of its own.

FOLDER has the client's program. It gets its files from `mlx-server connect --write`, in a home
folder of its own, and talks with a replay model. A line of JSON, a name and an error, is printed
for each session.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from conformance_parts.connected import AGENTS, Agent
from conformance_parts.namespaces import raise_loopback
from conformance_parts.recorder import recorded
from mlx_server.clients.connect import CLIENTS, NO_KEY, Connection, filled
from tests.live.server import LiveServer, eventually, serving

MODEL, SHORT = "talker", "short"
CONTEXT, TOO_SHORT = 400_000, 2_000
SECONDS = 600.0
FILE = "made.txt"
SAID, WRITTEN, CONTENT = "All is well here.", "The file is there.", "made by a tool"
ASKED, TO_WRITE = "How are things?", "Write the file now."
AGAIN, TO_TELL = "Once more: How are things?", "Tell a long story."
STORY = {"match": "regex:Tell a long story", "output": "No end. " * 500, "delay_ms": 20}
PROMPT_TOKENS = re.compile(rf"POST \S+ 200 \S+ (\d+)\+\d+ tokens, {MODEL} ")
"""Matches the line of the log for an answer."""
CACHED = "mlx_server_cached_prompt_tokens_total"


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

    @property
    def agent(self) -> Agent:
        return AGENTS[self.client]

    def ask(
        self, prompt: str, model: str = MODEL, more: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        return self._run(self._command((*self.agent.arguments, *more), prompt, model), model)

    def go_on(self, prompt: str) -> subprocess.CompletedProcess[str]:
        return self._run(self._command(self.agent.continues or (), prompt, MODEL))

    def abort(self, prompt: str) -> None:
        """Sends a prompt, and interrupts the client while the model answers."""
        with subprocess.Popen(
            self._command(self.agent.arguments, prompt, MODEL),
            **self._place(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as child:
            busy = self.server.gauge
            eventually(lambda: busy("mlx_server_batch_size") > 0, "it answers", SECONDS)
            os.killpg(child.pid, signal.SIGINT)  # what a terminal does for Ctrl-C
            child.wait(SECONDS)

    def _command(self, arguments: tuple[str, ...], prompt: str, model: str) -> list[str]:
        values = {"{prompt}": prompt, "{model}": model}
        program = CLIENTS[self.client].command[0]
        return [str(self.folder / program), *(_filled(each, values) for each in arguments)]

    def _run(self, command: list[str], model: str = MODEL) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, **self._place(model), capture_output=True, text=True, timeout=SECONDS
        )

    def _place(self, model: str = MODEL) -> dict[str, Any]:
        context = CONTEXT if model == MODEL else TOO_SHORT
        connection = Connection(self.server.url, NO_KEY, model, context)
        environment = {
            **os.environ,
            **filled(CLIENTS[self.client].environment, connection),
            "HOME": str(self.home),
            "PWD": str(self.work),
            "XDG_CONFIG_HOME": str(self.home / ".config"),
            "TERM": "dumb",
        }
        return {"cwd": self.work, "env": environment, "stdin": subprocess.DEVNULL}


def call(name: str, **arguments: Any) -> str:
    """Returns what a model of the qwen3 family writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def answers(session: Session) -> None:
    session.connect(MODEL)
    done = session.ask(ASKED)
    assert SAID in done.stdout, done.stdout[-300:] + done.stderr[-300:]


@dataclass(frozen=True)
class Requests:
    """The requests that the client has sent since this object was made."""

    server: LiveServer
    begun: int
    cached: float

    @classmethod
    def of(cls, server: LiveServer) -> Self:
        return cls(server, len(server.log), server.counted(CACHED))

    def longest(self) -> list[int]:
        """Returns the tokens of their prompts, the longest one first."""
        found = PROMPT_TOKENS.findall(self.server.log[self.begun :])
        return sorted(map(int, found), reverse=True)

    def check_cached(self, before: int, unrepeated: int) -> None:
        cached = self.server.counted(CACHED) - self.cached
        assert cached >= before - unrepeated, f"{cached} tokens are cached of {before}"


def goes_on(session: Session) -> None:
    """Checks that the second prompt begins with the first, and is computed from its end."""
    session.connect(MODEL)
    first = Requests.of(session.server)
    session.ask(ASKED)
    then = Requests.of(session.server)
    done = session.go_on(AGAIN)
    assert SAID in done.stdout, done.stdout[-300:] + done.stderr[-300:]
    then.check_cached(first.longest()[0], session.agent.unrepeated)


def is_interrupted(session: Session) -> None:
    session.connect(MODEL)
    begun = len(session.server.log)
    session.abort(TO_TELL)
    eventually(session.server.idle, "the row is gone")
    eventually(lambda: " gone " in session.server.log[begun:], "the log says so")
    done = session.ask(ASKED)
    assert SAID in done.stdout, done.stdout[-300:] + done.stderr[-300:]


def writes(session: Session) -> None:
    session.connect(MODEL)
    requests = Requests.of(session.server)
    done = session.ask(TO_WRITE, more=session.agent.extra)
    made = session.work / FILE
    assert made.is_file(), done.stdout[-300:] + done.stderr[-300:]
    assert made.read_text("utf-8").strip() == CONTENT
    assert (SAID if session.agent.adds_context else WRITTEN) in done.stdout, done.stdout[-300:]
    if session.agent.call:  # the result of the call is in a second prompt
        requests.check_cached(requests.longest()[1], session.agent.unrepeated)


def overflows(session: Session) -> None:
    """Checks that the client recognises the error by its words, and ends."""
    session.connect(SHORT)
    done = session.ask("How are things? " * 200, SHORT, session.agent.reported)
    said = done.stdout + done.stderr
    assert session.agent.overflow in said, said[-300:]


def sessions(agent: Agent) -> Iterator[tuple[str, Callable[[Session], None]]]:
    yield "an answer", answers
    yield "a file written by a tool", writes
    if agent.continues:
        yield "a second turn, with the first one cached", goes_on
    if agent.is_interrupted:
        yield "an abort, and on", is_interrupted
    yield "an overflow", overflows


def transcript(client: str, work: Path) -> list[dict[str, Any]]:
    write = [{"match": "regex:Write the file", "output": text} for text in _writing(client, work)]
    return [{"match": "regex:How are things", "output": SAID}, STORY, *write, {"output": SAID}]


def _writing(client: str, work: Path) -> list[str]:
    """Returns what the model says to have the file written, and what it says after that."""
    if not (writes_file := AGENTS[client].call):
        return [f"{WRITTEN}\n\n{FILE}\n```\n{CONTENT}\n```\n"]
    name, given = writes_file
    values = {"{file}": str(work / FILE), "{content}": CONTENT}
    arguments = {key: _filled(value, values) for key, value in given.items()}
    return [call(name, **arguments), WRITTEN]


def _filled(text: str, values: Mapping[str, str]) -> str:
    for place, value in values.items():
        text = text.replace(place, value)
    return text


def main(client: str, folder: str) -> None:
    raise_loopback()
    # shells make background jobs ignore SIGINT, and the clients would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
        with (
            serving(Path(place), {"models": models}) as started,
            recorded(started, client) as server,
        ):
            session = Session(client, Path(folder), server, home)
            for name, run in sessions(session.agent):
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
