"""Clients in sessions of 30 turns, each in a network without a way out."""

from collections.abc import Iterator, Sequence

from conformance_parts import installed
from conformance_parts.connected import AGENTS
from conformance_parts.isolated import IsolatedClient, outcomes
from conformance_parts.outcomes import Outcome

SUITE = "long-sessions"


def _opencode() -> Sequence[str]:
    return [str(installed.programs(AGENTS["opencode"].package))]


def _pydantic_ai() -> Sequence[str]:
    return [str(installed.clients())]


CLIENTS = (
    IsolatedClient(
        *(SUITE, "opencode", AGENTS["opencode"].package),
        *("conformance_parts.opencode_sessions", _opencode),
    ),
    IsolatedClient(
        *(SUITE, "pydantic-ai", installed.PYDANTIC_AI),
        *("conformance_parts.pydantic_ai_sessions", _pydantic_ai),
    ),
)


def long_sessions() -> Iterator[Outcome]:
    for client in CLIENTS:
        yield from outcomes(client)
