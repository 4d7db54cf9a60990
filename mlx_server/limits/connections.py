"""Limits on connections and on the data that arrives on them."""

from mlx_server.limits.limit import Limit

CONNECTIONS = Limit(
    bounds="open connections, and at most half of the process's descriptors",
    value=1024,
    unit="sockets",
    per="server",
    beyond="the longest idle one is closed; if none is idle, 503 and the new one is closed",
)
CONNECTIONS_PER_ADDRESS = Limit(
    bounds="open connections from one address (one /64 network of IPv6); at most three in four",
    value=768,
    unit="sockets",
    per="client",
    beyond="its longest idle one is closed; if none is idle, 503 and the new one is closed",
)
ACCEPTED_AT_ONCE = Limit(
    bounds="connections that are accepted before the next count",
    value=16,
    unit="sockets",
    per="server",
    beyond="they wait in the kernel's queue",
)
IDLE_SECONDS = Limit(
    bounds="the time for which a connection stays open without a request",
    value=5,
    unit="seconds",
    per="connection",
    beyond="it is closed",
)
RECEIVE_SECONDS = Limit(
    bounds="the time in which a request (head and body) or a WebSocket's handshake must arrive",
    value=30,
    unit="seconds",
    per="request",
    beyond="the connection is closed",
    setting="server.receive_seconds",
)
SEND_SECONDS = Limit(
    bounds="the time in which a client must read some of the data sent to it",
    value=30,
    unit="seconds",
    per="connection",
    beyond="the connection is closed",
    setting="server.send_seconds",
)
HEAD_BYTES = Limit(
    bounds="a request's head, the head of one chunk of a body, and the trailers after a body",
    value=64 << 10,
    unit="bytes",
    per="request",
    beyond="400 and the connection is closed",
)
HEADERS = Limit(
    bounds="the header lines of a request",
    value=256,
    unit="items",
    per="request",
    beyond="400 and the connection is closed",
)
SMALL_CHUNKS = Limit(
    bounds="chunks of a body with less than 256 bytes",
    value=4096,
    unit="items",
    per="request",
    beyond="400 and the connection is closed",
)
PIPELINED_BYTES = Limit(
    bounds="further requests that a client sends before its answer is complete",
    value=64 << 10,
    unit="bytes",
    per="connection",
    beyond="the connection is closed",
)
SEND_BUFFER_BYTES = Limit(
    bounds="the kernel's send buffer for an unread answer, which Linux doubles",
    value=128 << 10,
    unit="bytes",
    per="connection",
    beyond="the answer waits, for `server.send_seconds` at most",
)
DESCRIPTORS = Limit(
    bounds="files and sockets that the process may open, if its hard limit allows it",
    value=8192,
    unit="sockets",
    per="server",
    beyond="503 for the connection; half of them are reserved for other uses",
)
