"""A line of the log is one line, whatever it says."""

import json
import logging

from mlx_server.system import logs


def test_a_line_is_one_line() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 1, "one\ntwo\x1b[2J\u2028%s", ("\r",), None)
    line = logs.PlainFormatter().format(record)
    assert line.endswith("INFO    a: one\\ntwo\\x1b[2J\\u2028\\r")
    assert json.loads(logs.JsonFormatter().format(record))["message"] in line
