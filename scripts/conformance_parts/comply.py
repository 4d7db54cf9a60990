"""llm-comply: the schemas of Open Responses and of chat completions."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from conformance_parts.outcomes import Outcome, Verdict
from conformance_parts.talks import QUIET

FORMATS = ("open-responses", "openai-chat")
SECONDS = 900.0


def comply(python: Path, model: str, url: str) -> Iterator[Outcome]:
    for format in FORMATS:
        program = str(python.with_name("llm-comply"))
        command = [program, "-u", f"{url}/v1", "-k", "none", "-m", model, "--format", format]
        done = subprocess.run(
            [*command, "--json"],
            env={**os.environ, **QUIET},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        for reported in json.loads(done.stdout)["results"]:
            why = tuple(reported.get("errors", ()))
            yield Outcome(f"llm-comply {format}", model, reported["id"], _verdict(reported), why)


def _verdict(reported: dict[str, str]) -> Verdict:
    verdicts: dict[str, Verdict] = {"passed": "passed", "skipped": "skipped"}
    return verdicts.get(reported["status"], "failed")
