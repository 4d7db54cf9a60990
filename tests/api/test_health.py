"""The server is healthy while each engine that it needs is alive."""

import pytest
from starlette.testclient import TestClient

from mlx_server.pool.pool import Pool
from tests.api import wire


@pytest.mark.parametrize(("healthy", "status"), [(True, 200), (False, 503)])
def test_a_dead_engine_is_a_status_that_is_no_success(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, healthy: bool, status: int
) -> None:
    monkeypatch.setattr(Pool, "healthy", healthy)
    found = client.get("/health")
    assert found.status_code == status
    assert wire.as_json(found) == {"status": "ok" if healthy else "engine_died"}
