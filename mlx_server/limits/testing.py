"""Limits of the server that the pytest plugin starts."""

from mlx_server.limits.limit import Limit

RECORDED_REQUEST_BYTES = Limit(
    bounds="the bodies of requests that the server of a test run keeps for the test",
    value=64 << 20,
    unit="bytes",
    per="server",
    beyond="the oldest are dropped",
)
UNANSWERED_REQUESTS = Limit(
    bounds="requests without an answer that the server of a test run names",
    value=100,
    unit="items",
    per="server",
    beyond="further ones are not named",
)
