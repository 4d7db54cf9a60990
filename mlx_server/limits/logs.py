"""Limits on error messages and logs."""

from mlx_server.limits.limit import Limit

ERROR_CHARACTERS = Limit(
    "the message of an error", 1000, "characters", "request", beyond="it is truncated"
)
WRONG_FIELD_MESSAGE_CHARACTERS = Limit(
    "the message about an invalid field", 300, "characters", "request", beyond="it is truncated"
)
WRONG_FIELD_CHARACTERS = Limit(
    "`param`, the path of an invalid field", 200, "characters", "request", beyond="it is truncated"
)
LOGGED_PATH_PARTS = Limit(
    "segments of a path in the log", 12, "items", "request", beyond="the rest is logged as one"
)
LOG_FILE_BYTES = Limit("a log file", 10 << 20, "bytes", "server", beyond="a new one is started")
LOG_FILES = Limit("older log files", 4, "items", "server", beyond="the oldest is deleted")
