"""`python -m conformance_parts.pydantic_ai_sessions PYTHON`, in a network of its own.

It prints a line of JSON, a name and an error, for a session of 30 turns that an agent of
pydantic-ai has with a replay model: reasoning, calls, a sub-agent and a summary.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conformance_parts.agent_sessions import MODEL, call, thought
from conformance_parts.namespaces import raise_loopback
from conformance_parts.recorder import recorded
from tests.live.server import LiveServer, serving

CLIENT = "pydantic-ai"
TURNS, SUBAGENT = 30, 12
COUNT = "Count the lines"
CONTEXT = 200_000
SECONDS = 600.0

Json = dict[str, Any]


def transcript() -> Iterator[Json]:
    """Yields what the model plays, in turn."""
    yield {"match": f"regex:{COUNT}", "output": thought("I count.") + "Ten."}
    yield {"match": "regex:Sum up", "output": thought("It is short.") + "All is in order."}
    for turn in range(TURNS):
        yield {"output": thought(f"I look at part {turn}.") + call("look", part=turn)}
        if turn == SUBAGENT:
            yield {"output": thought("Another has to look.") + call("delegate", task=COUNT)}
        answer = f"Part {turn} is as it should be."
        yield {"output": thought(f"I have seen part {turn}.") + answer}


def talk(python: str, server: LiveServer) -> str:
    """Returns the error of the session; empty if there was none."""
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "none",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [python, "-m", "conversations.pydantic_ai_agent", MODEL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    return (done.stderr.strip() or "it failed")[-500:] if done.returncode else ""


def main(python: str) -> None:
    raise_loopback()
    with TemporaryDirectory() as place:
        entries = "\n".join(map(json.dumps, transcript()))
        (Path(place) / "said.jsonl").write_text(entries, "utf-8")
        replay = {"source": "replay:said.jsonl", "family": "qwen3", "context_length": CONTEXT}
        with (
            serving(Path(place), {"models": {MODEL: replay}}) as started,
            recorded(started, CLIENT) as server,
        ):
            error = talk(python, server)
        sys.stdout.write(json.dumps(["30 turns", error]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
