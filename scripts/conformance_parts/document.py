"""Writes the table of clients: which version was tested with this server, and the result."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from conformance_parts.conversations.weather import FAMILIES
from conformance_parts.outcomes import Outcome

SUITES = ("claude-code", "codex", "connected", "conversations")
"""The suites whose subjects are clients. The others are test suites."""
SESSIONS = (
    "an answer; a file written by a tool; a second turn, with the first one cached; "
    "an abort, and on; an overflow"
)
FAMILY = re.compile(f", ({'|'.join(FAMILIES)})$")
HEAD = f"""# Clients that were tested

Each is as its maker ships it, on loopback; programs run in a network without a way out. Made by
`scripts/conformance --table mlx_server/clients/TESTED.md`, which needs Node.js 20 for most of them.
Conversations were tested with two families each, with parallel calls and with calls in turn, and
most of them streamed and not.

The five sessions are: {SESSIONS}.

Not in the table: Zed, VS Code, JetBrains AI Assistant and Xcode have no mode without a window, and
Crush's program could not be downloaded here. Kimi Code 2.1.0, OpenClaw 2026.9.6 and OpenHands
1.16.0 answered when they were run by hand; the other sessions do not fit them yet.

| Client | Version | What was done | Result |
|---|---|---|---|
"""


def update(file: Path, outcomes: Iterable[Outcome]) -> None:
    """Writes the rows of these clients and keeps those of others."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    rows = {_key(line): line for line in lines if line.startswith("| ")}
    rows.pop(_key(HEAD.splitlines()[-2]), None)
    grouped: dict[str, list[Outcome]] = {}
    for each in outcomes:
        is_versioned = "@" in each.subject or "==" in each.subject  # no version: never started
        if each.suite in SUITES and is_versioned and each.verdict != "skipped":
            grouped.setdefault(each.subject, []).append(each)
    rows |= {_key(line): line for line in _rows(grouped.items())}
    file.write_text(HEAD + "".join(f"{rows[key]}\n" for key in sorted(rows)), "utf-8")


def _rows(grouped: Iterable[tuple[str, Sequence[Outcome]]]) -> Iterator[str]:
    for subject, outcomes in grouped:
        packages = [_parted(package) for package in subject.split()]
        names = ", ".join(f"`{name}`" for name, _ in packages)
        versions = ", ".join(version for _, version in packages)
        tests = (FAMILY.sub("", each.test).removesuffix(", streamed") for each in outcomes)
        done = dict.fromkeys(tests)
        failed = [each.test for each in outcomes if each.verdict == "failed"]
        passed = f"{len(outcomes) - len(failed)} of {len(outcomes)} pass"
        result = f"{passed}; not: {'; '.join(failed)}" if failed else passed
        what = "; ".join(done).replace(SESSIONS, "five sessions")
        yield f"| {names} | {versions} | {what} | {result} |"


def _parted(package: str) -> tuple[str, str]:
    name, _, version = package.replace("==", "@").rpartition("@")
    return name, version


def _key(row: str) -> str:
    return row.split("|")[1].strip()
