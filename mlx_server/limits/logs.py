"""Errors and logs."""

from mlx_server.limits.limit import Limit

# Errors and logs

ERROR_CHARACTERS = Limit(
    bounds="the message of an error",
    value=1000,
    unit="characters",
    per="request",
    beyond="it is cut",
)
WRONG_FIELD_MESSAGE_CHARACTERS = Limit(
    bounds="what is told of a field that is wrong",
    value=300,
    unit="characters",
    per="request",
    beyond="it is cut",
)
WRONG_FIELD_CHARACTERS = Limit(
    bounds="`param`, the place of a field that is wrong",
    value=200,
    unit="characters",
    per="request",
    beyond="it is cut",
)
LOGGED_PATH_PARTS = Limit(
    bounds="parts of a path that the log tells apart",
    value=12,
    unit="items",
    per="request",
    beyond="the rest is told as one",
)
LOG_FILE_BYTES = Limit(
    bounds="a log file",
    value=10 << 20,
    unit="bytes",
    per="server",
    beyond="another one is begun",
)
LOG_FILES = Limit(
    bounds="older log files",
    value=4,
    unit="items",
    per="server",
    beyond="the oldest is deleted",
)
