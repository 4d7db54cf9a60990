import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.upstream import connection
from mlx_server.upstream.connection import UpstreamBreaker
from tests.upstream.failing import HASTY, NOWHERE, connections
from tests.upstream.playing import KEY, KEY_VARIABLE, PlayingServer, gateway


@pytest.fixture(scope="session")
def upstream() -> Iterator[PlayingServer]:
    """One server for all tests; each says first what it plays."""
    with PlayingServer() as server:
        yield server


@pytest.fixture
def pauses(server: TestClient, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What would have been waited for, in seconds."""
    asked: list[float] = []

    async def pause(seconds: float) -> None:
        asked.append(seconds)

    monkeypatch.setenv(KEY_VARIABLE, KEY)
    hasty = SimpleNamespace(**vars(asyncio) | {"sleep": pause})
    monkeypatch.setattr(connection, "asyncio", hasty)
    for each in connections(server):
        each.breaker = UpstreamBreaker()
    return asked


@pytest.fixture(scope="session")
def server(upstream: PlayingServer) -> Iterator[TestClient]:
    """Serves models whose upstreams fail in different ways."""
    models: dict[str, dict[str, Any]] = {
        "up": {"api_key_env": KEY_VARIABLE},
        "hasty": {"upstream": HASTY},
        "patient": {"upstream": {"retries": 2}},
        "keyless": {"api_key_env": "TEST_UPSTREAM_KEY_THAT_IS_NOT_SET"},
        "gone": {"source": f"openai+{NOWHERE}/v1"},
        "safe": {"source": f"openai+{NOWHERE}/v1", "fallback": ("gone", "up")},
        "unsafe": {"source": f"openai+{NOWHERE}/v1", "fallback": ("gone",)},
    }
    with gateway(upstream.url, models) as client:
        yield client


@pytest.fixture
def client(server: TestClient, pauses: list[float]) -> TestClient:
    """Of a server that has not failed yet and does not pause."""
    return server
