"""`python -m conformance_parts.opencode_sessions PROGRAM`, in a network of its own.

It prints a line of JSON, a name and an error, for a session of 30 turns that opencode has with a
replay model: reasoning, calls, a sub-agent, and a compaction where a long file fills the context.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conformance_parts.agent_sessions import MODEL, Session, call, thought
from conformance_parts.namespaces import raise_loopback
from conformance_parts.recorder import recorded
from tests.live.server import serving

CLIENT = "opencode"
TURNS, EDIT, SUBAGENT, LONG = 30, 6, 12, 20
"""The number of turns, and those in which the model changes a file, asks a sub-agent and reads a
long file."""
CONTEXT = 75_000
LINES = 700
COUNT = "Count the lines of the first file."

Json = dict[str, Any]


def asked(turn: int) -> str:
    return f"Task {turn}: look at part{turn}.txt, and say what is in it."


def answer(turn: int) -> str:
    return f"Part {turn} is as it should be."


def transcript(work: Path) -> Iterator[Json]:
    """Yields what the model plays, in turn."""
    yield {"match": "regex:title", "output": "Reads parts"}
    yield {"match": f"regex:{COUNT}", "output": thought("I count.") + "It has one line."}
    yield {"match": "regex:summary process", "output": "They look at parts, in turn."}
    yield {"match": "regex:Continue if you have next steps", "output": "I wait for more."}
    for turn in range(TURNS):
        file = str(work / f"part{turn}.txt")
        read = call("read", filePath=file)
        yield {"output": thought(f"I look at part {turn}.") + "I look.\n" + read}
        if turn == EDIT:
            yield {"output": call("edit", filePath=file, oldString="content", newString="CONTENT")}
        if turn == SUBAGENT:
            task = {"description": "Count lines", "prompt": COUNT, "subagent_type": "general"}
            yield {"output": thought("Another has to look.") + call("task", **task)}
        yield {"output": thought(f"I have seen part {turn}.") + answer(turn)}


def thirty_turns(session: Session) -> None:
    session.connect(MODEL)
    for turn in range(TURNS):
        ask = session.go_on if turn else session.ask
        done = ask(asked(turn))
        assert answer(turn) in done.stdout, f"{turn}: {done.stdout[-300:]}{done.stderr[-300:]}"
    assert (session.work / f"part{EDIT}.txt").read_text("utf-8").startswith("CONTENT")


def main(folder: str) -> None:
    raise_loopback()
    with TemporaryDirectory() as place:
        home = Path(place) / "home"
        work = home / "work"
        work.mkdir(parents=True)
        for turn in range(TURNS):
            lines = LINES if turn == LONG else 1
            text = "".join(f"content of line {line} in part {turn}\n" for line in range(lines))
            (work / f"part{turn}.txt").write_text(text, "utf-8")
        entries = "\n".join(map(json.dumps, transcript(work)))
        (Path(place) / "said.jsonl").write_text(entries, "utf-8")
        replay = {"source": "replay:said.jsonl", "family": "qwen3", "context_length": CONTEXT}
        with (
            serving(Path(place), {"models": {MODEL: replay}}) as started,
            recorded(started, CLIENT) as server,
        ):
            error = _error(Session(CLIENT, Path(folder), server, home))
        sys.stdout.write(json.dumps(["30 turns", error]) + "\n")


def _error(session: Session) -> str:
    try:
        thirty_turns(session)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
