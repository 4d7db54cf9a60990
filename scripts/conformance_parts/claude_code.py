"""Claude Code, unchanged but for its base URL and key, in a network without a way out."""

from collections.abc import Iterator

from conformance_parts import installed
from conformance_parts.isolated import IsolatedClient, outcomes
from conformance_parts.outcomes import Outcome

SUITE = "claude-code"

CLIENT = IsolatedClient(
    SUITE,
    "claude",
    installed.CLAUDE_CODE,
    "conformance_parts.claude_sessions",
    installed.claude_code,
)


def claude_code() -> Iterator[Outcome]:
    yield from outcomes(CLIENT)
