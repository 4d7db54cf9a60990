"""Codex, unchanged but for its provider and model, in a network without a way out."""

from collections.abc import Iterator

from conformance_parts import installed
from conformance_parts.isolated import IsolatedClient, outcomes
from conformance_parts.outcomes import Outcome

SUITE = "codex"

CLIENT = IsolatedClient(
    SUITE, "codex", installed.CODEX, "conformance_parts.codex_sessions", installed.codex
)


def codex() -> Iterator[Outcome]:
    yield from outcomes(CLIENT)
