"""Runs llmprobe, which tests the API's surface and its required behaviour.

It also judges the model, which is not reported here, and measures its speed unless that is turned
off.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conformance_parts.outcomes import Outcome, Verdict
from conformance_parts.talks import QUIET

SUITE = "llmprobe"
SECONDS = 1800.0
TOKENS = 80_000
"""The most tokens of prompts and answers: it judges the model last, whose result is not used."""
Json = dict[str, Any]

VERDICTS: dict[str, Verdict] = {"pass": "passed", "fail": "failed"}


def probe(command: Sequence[str], model: str, url: str) -> Iterator[Outcome]:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        asked = [*command, url, "-m", model, "--full", "--no-bench", "--no-save"]
        try:
            done = subprocess.run(
                [*asked, "--timeout", "180", "--budget", str(TOKENS), "--save", str(report)],
                env={**os.environ, **QUIET, "HOME": folder},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            why = f"it did not end within {SECONDS:.0f} seconds"
            yield Outcome(SUITE, model, "all of it", "failed", (why,))
            return
        if not report.is_file():
            last = (done.stderr or done.stdout).strip()[-500:]
            yield Outcome(SUITE, model, "all of it", "failed", (last,))
            return
        reported = json.loads(report.read_text("utf-8"))
    yield from _conformance(reported["conformance"]["results"], model)
    yield from _coverage(reported["coverage"]["entries"], model)


def _conformance(results: Sequence[Json], model: str) -> Iterator[Outcome]:
    for result in results:
        if result["outcome"] != "unsupported":  # its coverage reports these once
            why = [each["message"] for each in result["failures"]] or [result.get("reason", "")]
            verdict = VERDICTS.get(result["outcome"], "skipped")
            yield Outcome(SUITE, model, result["id"], verdict, tuple(why))


def _coverage(entries: Sequence[Json], model: str) -> Iterator[Outcome]:
    for entry in entries:
        if entry.get("probed", True):
            verdict: Verdict = "passed" if entry["supported"] else "failed"
            why = (entry.get("detail", ""),)
            yield Outcome(SUITE, model, f"has {entry['id']}", verdict, why)
