"""The conversations, had by the clients' own Python."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

from conformance_parts.outcomes import Outcome, Verdict

SUITE = "conversations"
CLIENTS = ("openai", "agents", "pydantic_ai", "langchain", "anthropic", "ollama")

QUIET = {
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_API_KEY": "none",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
"""They are to talk to our server and to nobody else."""


def talk(python: Path, client: str, url: str) -> Iterator[Outcome]:
    command = [str(python), "-m", "conversations", client]
    environment = {**os.environ, **QUIET, "OPENAI_BASE_URL": f"{url}/v1"}
    environment["ANTHROPIC_BASE_URL"] = environment["OLLAMA_HOST"] = url
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    with TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child:
            assert child.stdout
            for line in child.stdout:
                yield _outcome(json.loads(line))
        if child.returncode:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["nothing was said"])[-1]
            yield Outcome(SUITE, client, "all of them", "failed", (last,))


def _outcome(told: dict[str, str]) -> Outcome:
    verdict: Verdict = "failed" if told["error"] else "passed"
    return Outcome(SUITE, told["family"], told["name"], verdict, (told["error"],))
