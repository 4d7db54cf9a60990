"""Failures of MCP servers, for the model, the client and the log."""

import pytest

from mlx_server.mcp.errors import ConnectionLost, McpError, McpRefused, ToolFailed, cause

SAID = "the server's own words"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (McpError(SAID), "McpError"),
        (ToolFailed(SAID), "ToolFailed"),
        (ConnectionLost(SAID), "ConnectionLost"),
        (McpRefused(SAID, 403), "HTTP 403"),
    ],
)
def test_the_log_has_the_kind_and_the_client_has_the_words(error: McpError, kind: str) -> None:
    assert error.kind == kind
    assert str(error) == SAID


def test_the_cause_is_the_first_error_however_deep_the_groups_are() -> None:
    first, second = ConnectionLost("one"), ValueError("two")
    assert cause(first) is first
    assert cause(ExceptionGroup("g", [first, second])) is first
    nested = ExceptionGroup("out", [ExceptionGroup("in", [first]), second])
    assert cause(BaseExceptionGroup("all", [nested, KeyboardInterrupt()])) is first
    interrupt = KeyboardInterrupt()
    assert cause(BaseExceptionGroup("all", [interrupt, first])) is interrupt
