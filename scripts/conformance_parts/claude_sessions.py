"""`python -m conformance_parts.claude_sessions COMMAND...`, in a network of its own.

It prints a line of JSON, a name and an error, for each session of Claude Code with replay models.

Claude Code's own prompt has some 86,000 bytes, each of which is a token for these models.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conformance_parts.agent_sessions import call, thought
from conformance_parts.namespaces import raise_loopback
from conformance_parts.recorder import recorded
from tests.live.server import LiveServer, eventually, serving

MODEL, SHORT = "talker", "short"
CONTEXTS = {MODEL: 200_000, SHORT: 90_000}
SECONDS = 600.0
LONG_FILES, LINES = 6, 280
SUMMARISED = "regex:before the last conversation was summarized"
"""Matches the note with which the conversation goes on, after the last calls."""
TITLE = {"match": "regex:Write the title in the language", "output": '{"title": "Reads files"}'}

COUNT, SUBAGENT, LOOKS = "Count the lines of a.txt.", "general-purpose", 24

Json = dict[str, Any]


def transcripts(work: Path) -> dict[str, list[Json]]:
    """Returns what each model plays, in turn."""
    a, none = f"{work}/a.txt", f"{work}/none.txt"
    edit = call("Edit", file_path=a, old_string="content", new_string="CONTENT")
    reads = f"{call('Read', file_path=a)}\n{call('Read', file_path=none)}"
    agent = call("Agent", description="Count lines", prompt=COUNT, subagent_type=SUBAGENT)
    long = [call("Read", file_path=f"{work}/long{i}.txt") for i in range(LONG_FILES)]
    summary = "<analysis>They read.</analysis>\n<summary>They read long files.</summary>"
    return {
        MODEL: [
            TITLE,
            {"output": thought("I read both.") + "I look.\n" + reads},
            {"output": thought("Only one is there.") + edit},
            {"output": thought("It is done.") + "I changed a.txt."},
            {"output": thought("Again.") + "Nothing more to do."},
            {"output": "No end. " * 500, "delay_ms": 20},
            {"output": "Here again."},
            {"match": f"regex:{COUNT}", "output": "It has one line."},
            {"output": thought("Another has to look.") + agent},
            *({"output": thought(f"Look {i}.") + call("Read", file_path=a)} for i in range(LOOKS)),
            {"output": thought("Enough.") + "It has one line, I looked."},
        ],
        SHORT: [
            TITLE,
            {"match": "regex:detailed summary", "output": summary},
            {"last": SUMMARISED, "output": "They are long."},
            *({"output": output} for output in long),
        ],
    }


@dataclass(frozen=True)
class Claude:
    program: list[str]
    server: LiveServer
    home: Path
    work: Path

    def __call__(self, prompt: str, *options: str, model: str = MODEL) -> list[Json]:
        """Returns the events of a session that ends by itself."""
        done = subprocess.run(
            self._command(prompt, options, model),
            **self._place(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        lines = done.stdout.splitlines()
        assert done.returncode == 0, f"{done.stderr[-300:]}{''.join(lines[-1:])[-500:]}"
        return [json.loads(line) for line in lines]

    def abort(self, prompt: str, *options: str) -> None:
        """Runs a session that is interrupted while the model answers."""
        eventually(self.server.idle, "the row before is gone")
        with subprocess.Popen(
            self._command(prompt, options, MODEL),
            **self._place(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as child:
            eventually(
                lambda: self.server.gauge("mlx_server_batch_size") > 0, "it answers", SECONDS
            )
            os.killpg(child.pid, signal.SIGINT)  # what a terminal does for Ctrl-C
            child.wait(SECONDS)
        eventually(self.server.idle, "the row is gone")

    def _command(self, prompt: str, options: tuple[str, ...], model: str) -> list[str]:
        reported = (
            "--output-format",
            "stream-json",
            "--verbose",
            "--permission-mode",
            "acceptEdits",
        )
        return [*self.program, "--model", model, *reported, *options, "-p", prompt]

    def _place(self) -> dict[str, Any]:
        environment = {
            **os.environ,
            "HOME": str(self.home),
            "ANTHROPIC_BASE_URL": self.server.url,
            "ANTHROPIC_API_KEY": "none",
        }
        return {"cwd": self.work, "env": environment}


def messages(events: list[Json], role: str) -> list[Json]:
    return [event["message"] for event in events if event["type"] == role]


def blocks(events: list[Json], role: str, kind: str) -> list[Json]:
    contents = (message["content"] for message in messages(events, role))
    found = (block for content in contents if isinstance(content, list) for block in content)
    return [block for block in found if block["type"] == kind]


def prompt_tokens(usage: Mapping[str, int]) -> int:
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[name] for name in names)


def sessions(claude: Claude) -> Iterator[tuple[str, Callable[[], None]]]:
    last: list[Json] = []

    def files() -> None:
        events = claude("Read the files a.txt and none.txt, then change the first.")
        assert events[-1]["result"] == "I changed a.txt.", events[-1]
        assert (claude.work / "a.txt").read_text("utf-8") == "CONTENT of a\n"
        results = blocks(events, "user", "tool_result")
        # parallel calls may end in any order
        errors = sorted(bool(each.get("is_error")) for each in results)
        assert errors == [False, False, True], results
        thoughts = blocks(events, "assistant", "thinking")
        assert [each["thinking"] for each in thoughts] == [
            "I read both.",
            "Only one is there.",
            "It is done.",
        ]
        last.extend(messages(events, "assistant"))

    def continued() -> None:
        events = claude("And again?", "--continue")
        assert events[-1]["result"] == "Nothing more to do.", events[-1]
        cached = events[-1]["usage"]["cache_read_input_tokens"]
        before = prompt_tokens(last[-1]["usage"])
        assert cached >= before - 64, f"{cached} tokens are cached of {before}"

    def aborted() -> None:
        claude.abort("Tell me a story.", "--continue")
        events = claude("Are you there?", "--continue")
        assert events[-1]["result"] == "Here again.", events[-1]

    def compacted() -> None:
        events = claude("Read the long files.", model=SHORT)
        assert events[-1]["result"] == "They are long.", events[-1]
        kinds = [event.get("subtype") for event in events]
        assert "compact_boundary" in kinds, kinds

    yield "files are read and edited, one is not there", files
    yield "--continue, with the prompt cached", continued
    yield "an abort, and on", aborted

    def delegated() -> None:
        events = claude("How many lines are there? Ask an agent.", "--continue")
        assert events[-1]["result"] == "It has one line, I looked.", events[-1]
        results = blocks(events, "user", "tool_result")
        assert len(results) == LOOKS + 1, results

    yield "a sub-agent, and two dozen calls in turn", delegated
    yield "compaction after an overflow", compacted


def main(program: list[str]) -> None:
    raise_loopback()
    with TemporaryDirectory() as name:
        folder = Path(name)
        home, work = folder / "home", folder / "work"
        home.mkdir()
        work.mkdir()
        (work / "a.txt").write_text("content of a\n", "utf-8")
        for i in range(LONG_FILES):
            lines = (f"line {line} of a very long file {i}\n" for line in range(LINES))
            (work / f"long{i}.txt").write_text("".join(lines), "utf-8")
        for model, entries in transcripts(work).items():
            text = "\n".join(map(json.dumps, entries))
            (folder / f"{model}.jsonl").write_text(text, "utf-8")
        models = {
            model: {"source": f"replay:{model}.jsonl", "family": "qwen3", "context_length": context}
            for model, context in CONTEXTS.items()
        }
        with (
            serving(folder, {"models": models}) as started,
            recorded(started, "claude-code") as server,
        ):
            for title, session in sessions(Claude(program, server, home, work)):
                sys.stdout.write(json.dumps([title, _error(session)]) + "\n")
                sys.stdout.flush()


def _error(session: Callable[[], None]) -> str:
    try:
        session()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
