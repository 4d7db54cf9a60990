"""Runs MCP's own conformance suite for clients: our connectors play each of its scenarios."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conformance_parts import installed
from conformance_parts.outcomes import Outcome

SUITE = "mcp"
SECONDS = 120.0
ROOT = Path(__file__).parents[2]
BAD = ("FAILURE", "WARNING")


def mcp() -> Iterator[Outcome]:
    try:
        command = installed.mcp_suite()
    except installed.Missing as missing:
        yield Outcome(SUITE, "client", "all of it", "skipped", (str(missing),))
        return
    for scenario in _scenarios(command):
        yield _played(command, scenario)


def _scenarios(command: list[str]) -> list[str]:
    listed = subprocess.run([*command, "list"], check=True, capture_output=True, text=True).stdout
    _, _, clients = listed.partition("Client scenarios")
    return [line.split()[1] for line in clients.splitlines() if line.startswith("  - ")]


def _played(command: list[str], scenario: str) -> Outcome:
    client = f"{sys.executable} -m conformance_parts.mcp_client"
    path = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "client", "--command", client, "--scenario", scenario, "-o", folder],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        why = tuple(_complaints(Path(folder)))
    if done.returncode == 0:
        return Outcome(SUITE, "client", scenario, "passed")
    return Outcome(SUITE, "client", scenario, "failed", why or ("the client has failed",))


def _complaints(folder: Path) -> Iterator[str]:
    for file in folder.rglob("checks.json"):
        checks: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))
        for check in checks:
            if check["status"] in BAD:
                yield str(check.get("errorMessage") or check["description"])
