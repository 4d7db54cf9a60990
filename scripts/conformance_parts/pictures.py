"""Clients that read a picture, each in a network without a way out."""

from collections.abc import Iterator

from conformance_parts import installed
from conformance_parts.connected import AGENTS
from conformance_parts.isolated import IsolatedClient, outcomes
from conformance_parts.outcomes import Outcome

SUITE = "pictures"
SESSIONS = "conformance_parts.picture_sessions"
OPENCODE = AGENTS["opencode"].package

CLIENTS = (
    IsolatedClient(
        *(SUITE, "claude", installed.CLAUDE_CODE, SESSIONS),
        lambda: ["claude-code", *installed.claude_code()],
    ),
    IsolatedClient(
        *(SUITE, "codex", installed.CODEX, SESSIONS), lambda: ["codex", *installed.codex()]
    ),
    IsolatedClient(
        *(SUITE, "opencode", OPENCODE, SESSIONS),
        lambda: ["opencode", str(installed.programs(OPENCODE))],
    ),
)


def pictures() -> Iterator[Outcome]:
    for client in CLIENTS:
        yield from outcomes(client)
