"""Claude Code, unchanged but for its base URL and key, in a network without a way out."""

import json
import subprocess
import sys
from collections.abc import Iterator
from tempfile import TemporaryFile

from conformance_parts import installed, namespaces
from conformance_parts.outcomes import Outcome, Verdict

SUITE = "claude-code"


def claude_code() -> Iterator[Outcome]:
    try:
        command = [*namespaces.alone(), sys.executable, "-m", "conformance_parts.claude_sessions"]
        program = installed.claude_code()
    except installed.Missing as missing:
        yield Outcome(SUITE, "claude", "all sessions", "skipped", (str(missing),))
        return
    with TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [*command, *program], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child:
            assert child.stdout
            for line in child.stdout:
                name, error = json.loads(line)
                verdict: Verdict = "failed" if error else "passed"
                yield Outcome(SUITE, installed.CLAUDE_CODE, name, verdict, (error,))
        if child.returncode:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["nothing was said"])[-1]
            yield Outcome(SUITE, "claude", "all sessions", "failed", (last,))
