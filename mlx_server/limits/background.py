"""Limits on background responses."""

from mlx_server.limits.limit import Limit

BACKGROUND_RESPONSES = Limit("background responses", 64, "items", "server", beyond="503")
BACKGROUND_PER_CLIENT = Limit("background responses of one key", 48, "items", "key", beyond="503")
STREAM_LOG_BYTES = Limit(
    "events of a background response, until it ends",
    32 << 20,
    "bytes",
    "response",
    beyond="the response fails",
)
STREAM_LOGS_BYTES = Limit(
    "events of all background responses, until they end",
    256 << 20,
    "bytes",
    "server",
    beyond="503 for a new response, and a running one fails",
)
UNSTORED_ENDS = Limit(
    "responses that have ended and can't be stored yet",
    256,
    "items",
    "server",
    beyond="503 for a new response that is to be stored",
)
