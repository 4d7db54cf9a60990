"""Requests as metrics count them."""

from starlette.testclient import TestClient

from tests.api import wire
from tests.api.wire import sample

BODY = {"model": wire.MODEL, "prompt": "a"}


def test_metrics_count_requests(client: TestClient) -> None:
    name = 'mlx_server_requests_total{model="tiny",outcome="completed"}'
    client.post("/v1/completions", json=BODY)
    before = client.get("/metrics").text
    client.post("/v1/completions", json=BODY)
    assert sample(client.get("/metrics").text, name) == sample(before, name) + 1
