"""The limits of MCP servers, in a record so that tests can lower them."""

from dataclasses import dataclass

from mlx_server import limits


@dataclass(frozen=True, slots=True)
class McpLimits:
    open_seconds: float = limits.MCP_OPEN_SECONDS.value
    call_seconds: float = limits.MCP_CALL_SECONDS.value
    wait_seconds: float = limits.MCP_WAIT_SECONDS.value
    parallel_calls: int = limits.MCP_PARALLEL_CALLS.value
    servers: int = limits.MCP_SERVERS.value
    responses: int = limits.MCP_RESPONSES.value
    processes: int = limits.MCP_PROCESSES.value
    sessions: int = limits.MCP_SESSIONS.value
    tools: int = limits.MCP_TOOLS.value
    schema_bytes: int = limits.MCP_SCHEMA_BYTES.value
    all_tools: int = limits.MCP_ALL_TOOLS.value
    all_schema_bytes: int = limits.MCP_ALL_SCHEMA_BYTES.value
    result_bytes: int = limits.MCP_RESULT_BYTES.value
    all_result_bytes: int = limits.MCP_ALL_RESULT_BYTES.value
    message_bytes: int = limits.MCP_MESSAGE_BYTES.value
    session_bytes: int = limits.MCP_SESSION_BYTES.value
    error_characters: int = limits.MCP_ERROR_CHARACTERS.value
