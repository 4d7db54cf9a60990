"""What an MCP server may cost the request that names it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    open_seconds: float = 30.0
    """To be reached and to list its tools."""
    call_seconds: float = 30.0
    parallel_calls: int = 8
    """Of one response at a time."""
    servers: int = 16
    """Of one request."""
    responses: int = 64
    """That talk to servers at a time."""
    tools: int = 256
    """Of one server."""
    schema_bytes: int = 256 << 10
    """Names, descriptions and schemas of all its tools."""
    result_bytes: int = 1 << 20
    """Of a result, as the model gets it."""
    message_bytes: int = 8 << 20
    """Of a message, as it comes: results hold images that are left out."""
    session_bytes: int = 64 << 20
    """Of all that it sends."""
    error_characters: int = 500
    """Of what it says of its errors."""
