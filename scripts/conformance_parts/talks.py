"""Runs the conversations with the clients' own Python and Node.js."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from conformance_parts import installed
from conformance_parts.conversations.weather import FAMILIES
from conformance_parts.outcomes import Outcome, Verdict
from tests.live.server import DEMO

SUITE = "conversations"
NODE = "node_"
CLIENTS = ("openai", "agents", "pydantic_ai", "langchain", "anthropic", "ollama")
NODE_CLIENTS = ("node_openai", "node_anthropic", "node_ai_sdk", "node_agents")
NODE_CONVERSATIONS = Path(__file__).parent / "node_conversations"

QUIET = {
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_API_KEY": "none",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
"""Variables that let the clients connect to our server only."""


def talk(python: Path, client: str, url: str) -> Iterator[Outcome]:
    environment = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "ANTHROPIC_BASE_URL": url,
        "OLLAMA_HOST": url,
        "DEMO": DEMO,
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [str(python), "-m", "conversations", client]
    yield from _outcomes(client, command, environment, Path())


def node_talk(client: str, url: str) -> Iterator[Outcome]:
    try:
        node, folder = installed.node_clients()
    except installed.Missing as missing:
        yield Outcome(SUITE, client, "all of them", "skipped", (str(missing),))
        return
    for file in NODE_CONVERSATIONS.glob("*.mjs"):  # Node.js looks for packages next to the file
        shutil.copy(file, folder)
    command = [node, "talk.mjs", client.removeprefix(NODE), *FAMILIES]
    yield from _outcomes(client, command, {"SERVER": url, "DEMO": DEMO}, folder)


def _outcomes(
    client: str, command: Sequence[str], more: Mapping[str, str], folder: Path
) -> Iterator[Outcome]:
    environment = {**os.environ, **QUIET, **more}
    with TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child:
            assert child.stdout
            for line in child.stdout:
                if line.startswith("{"):  # the AI SDK prints warnings between these lines
                    yield _outcome(json.loads(line))
        if child.returncode:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["nothing was said"])[-1]
            yield Outcome(SUITE, client, "all of them", "failed", (last,))


def _outcome(reported: dict[str, str]) -> Outcome:
    verdict: Verdict = "failed" if reported["error"] else "passed"
    return Outcome(SUITE, reported["client"], reported["name"], verdict, (reported["error"],))
