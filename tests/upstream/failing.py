"""Upstreams that fail in known ways, and the pauses before they are asked again."""

from typing import Any, cast

from fastapi import FastAPI
from starlette.testclient import TestClient

from mlx_server.pool.pool import Pool
from mlx_server.upstream.connection import UpstreamConnection
from tests.upstream.playing import chat

NOWHERE = "http://127.0.0.1:9"
"""The port of a service that no machine runs any more."""

HASTY = {"retries": 0, "first_seconds": 0.3}


def connections(server: TestClient) -> list[UpstreamConnection]:
    pool: Pool = cast(FastAPI, server.app).state.pool
    return [model.connection for model in pool.models.upstreams]


def error_of(client: TestClient, status: int, **more: Any) -> Any:
    response = chat(client, **more)
    assert response.status_code == status, response.text
    return response.json()["error"]


WRONG = [5, "text", [], None, True, {"a": []}]
