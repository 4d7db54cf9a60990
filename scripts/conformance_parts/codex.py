"""Codex, unchanged but for its provider and model, in a network without a way out."""

import json
import subprocess
import sys
from collections.abc import Iterator
from tempfile import TemporaryFile

from conformance_parts import installed, namespaces
from conformance_parts.outcomes import Outcome, Verdict

SUITE = "codex"


def codex() -> Iterator[Outcome]:
    try:
        command = [*namespaces.alone(), sys.executable, "-m", "conformance_parts.codex_sessions"]
        program = installed.codex()
    except installed.Missing as missing:
        yield Outcome(SUITE, "codex", "all sessions", "skipped", (str(missing),))
        return
    with TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [*command, *program], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child:
            assert child.stdout
            for line in child.stdout:
                name, error = json.loads(line)
                verdict: Verdict = "failed" if error else "passed"
                yield Outcome(SUITE, installed.CODEX, name, verdict, (error,))
        if child.returncode:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["nothing was said"])[-1]
            yield Outcome(SUITE, "codex", "all sessions", "failed", (last,))
