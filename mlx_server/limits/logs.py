"""Limits on error messages and logs."""

from mlx_server.limits.limit import Limit

ERROR_CHARACTERS = Limit(
    bounds="the message of an error",
    value=1000,
    unit="characters",
    per="request",
    beyond="it is truncated",
)
WRONG_FIELD_MESSAGE_CHARACTERS = Limit(
    bounds="the message about an invalid field",
    value=300,
    unit="characters",
    per="request",
    beyond="it is truncated",
)
WRONG_FIELD_CHARACTERS = Limit(
    bounds="`param`, the path of an invalid field",
    value=200,
    unit="characters",
    per="request",
    beyond="it is truncated",
)
LOGGED_PATH_PARTS = Limit(
    bounds="segments of a path in the log",
    value=12,
    unit="items",
    per="request",
    beyond="the rest is logged as one",
)
LOG_FILE_BYTES = Limit(
    bounds="a log file",
    value=10 << 20,
    unit="bytes",
    per="server",
    beyond="a new one is started",
)
LOG_FILES = Limit(
    bounds="older log files",
    value=4,
    unit="items",
    per="server",
    beyond="the oldest is deleted",
)
