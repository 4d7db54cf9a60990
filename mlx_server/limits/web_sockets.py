"""Limits on WebSockets."""

from mlx_server.limits.limit import Limit

SOCKETS = Limit(
    "open WebSockets; a quarter of the process's descriptors, if that is less",
    128,
    "sockets",
    "server",
    beyond="503 at the handshake",
)
SOCKETS_PER_CLIENT = Limit(
    "open WebSockets of one client; half of those of the server, if that is less",
    64,
    "sockets",
    "client",
    beyond="503 at the handshake",
)
SOCKET_FRAMES = Limit(
    "messages that wait for an earlier response to end",
    8,
    "items",
    "connection",
    beyond="closed with 1008",
)
SOCKET_BYTES = Limit(
    "bytes of messages that wait or arrive, except for one large message",
    256 << 10,
    "bytes",
    "connection",
    beyond="no more is read until there is room",
)
FRAME_BYTES = Limit(
    "bytes of large WebSocket messages that arrive or are being read; one is always allowed",
    32 << 20,
    "bytes",
    "server",
    beyond="no more of it is read until there is room",
)
SOCKET_MEMORY_BYTES = Limit(
    "responses with `store: false` that a connection remembers, in bytes",
    16 << 20,
    "bytes",
    "connection",
    beyond="the oldest is dropped",
)
SOCKETS_MEMORY_BYTES = Limit(
    "responses with `store: false` that all connections remember, in bytes",
    256 << 20,
    "bytes",
    "server",
    beyond="it is not remembered",
)
SOCKET_RESPONSES = Limit(
    "responses with `store: false` that a connection remembers",
    4,
    "items",
    "connection",
    beyond="the oldest is dropped",
)
SOCKET_IDLE_SECONDS = Limit(
    "time without a request", 600, "seconds", "connection", beyond="closed with 1001"
)
SOCKET_SECONDS = Limit("age of a WebSocket", 3600, "seconds", "connection", beyond="closed")
