"""The server is healthy while each engine that it needs is alive, and says its version."""

import re

import pytest
from starlette.testclient import TestClient

from mlx_server import __version__
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


def test_the_version_is_in_vllms_form(client: TestClient) -> None:
    answer = client.get("/version")
    assert wire.as_json(answer) == {"version": __version__}
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", __version__)
