"""Responses in the background."""

from mlx_server.limits.limit import Limit

BACKGROUND_RESPONSES = Limit("responses in the background", 64, "items", "server", beyond="503")
BACKGROUND_PER_CLIENT = Limit(
    "responses in the background of one key", 48, "items", "key", beyond="503"
)
STREAM_LOG_BYTES = Limit(
    "events of a response in the background, until it ends",
    32 << 20,
    "bytes",
    "response",
    beyond="the response fails",
)
STREAM_LOGS_BYTES = Limit(
    "events of all responses in the background, until they end",
    256 << 20,
    "bytes",
    "server",
    beyond="503 for a new one, and one that goes on fails",
)
UNSTORED_ENDS = Limit(
    "responses that have ended and wait for the store to be usable again",
    256,
    "items",
    "server",
    beyond="503 for a new one that is to be stored",
)
