"""Runs the sessions of a client in a network without a way out, and reports each as it ends."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile

from conformance_parts import installed, namespaces
from conformance_parts.outcomes import Outcome, Verdict


@dataclass(frozen=True)
class IsolatedClient:
    suite: str
    name: str
    package: str
    """The client's package with its version."""
    sessions: str
    """The module that plays the sessions; it prints a line of JSON for each."""
    program: Callable[[], Sequence[str]]
    """Returns the command that runs the client, which are the module's arguments."""


def outcomes(client: IsolatedClient) -> Iterator[Outcome]:
    try:
        command = [*namespaces.alone(), sys.executable, "-m", client.sessions]
        program = client.program()
    except installed.Missing as missing:
        yield Outcome(client.suite, client.name, "all sessions", "skipped", (str(missing),))
        return
    with TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [*command, *program], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child:
            assert child.stdout
            for line in child.stdout:
                name, error = json.loads(line)
                verdict: Verdict = "failed" if error else "passed"
                yield Outcome(client.suite, client.package, name, verdict, (error,))
        if child.returncode:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["nothing was said"])[-1]
            yield Outcome(client.suite, client.name, "all sessions", "failed", (last,))
