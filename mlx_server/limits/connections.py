"""Connections, and what arrives on them."""

from mlx_server.limits.limit import Limit

CONNECTIONS = Limit(
    bounds="open connections, and never more than half of the process's descriptors",
    value=1024,
    unit="sockets",
    per="server",
    beyond="the longest idle one is closed; if none is idle, 503 and closed at once",
)
CONNECTIONS_PER_ADDRESS = Limit(
    bounds="open connections from one address (of IPv6, one /64 network): three in four at most",
    value=768,
    unit="sockets",
    per="client",
    beyond="its longest idle one is closed; if none is idle, 503 and closed at once",
)
ACCEPTED_AT_ONCE = Limit(
    bounds="connections that are taken before those already taken are counted",
    value=16,
    unit="sockets",
    per="server",
    beyond="they wait in the kernel's queue",
)
IDLE_SECONDS = Limit(
    bounds="the time that a connection stays open without a request",
    value=5,
    unit="seconds",
    per="connection",
    beyond="it is closed",
)
RECEIVE_SECONDS = Limit(
    bounds="the time that a request, head and body, or a WebSocket's handshake may take",
    value=30,
    unit="seconds",
    per="request",
    beyond="the connection is closed",
    setting="server.receive_seconds",
)
SEND_SECONDS = Limit(
    bounds="the time in which a client must read some of what it was sent",
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
    bounds="the chunks of a body that have less than 256 bytes each",
    value=4096,
    unit="items",
    per="request",
    beyond="400 and the connection is closed",
)
PIPELINED_BYTES = Limit(
    bounds="further requests that a client sends before it has its answer",
    value=64 << 10,
    unit="bytes",
    per="connection",
    beyond="the connection is closed",
)
SEND_BUFFER_BYTES = Limit(
    bounds="what the kernel keeps of an answer that is not read; Linux takes twice as much",
    value=128 << 10,
    unit="bytes",
    per="connection",
    beyond="the answer waits, and its client has send_seconds",
)
DESCRIPTORS = Limit(
    bounds="files and sockets that the process may open, if its hard limit lets it",
    value=8192,
    unit="sockets",
    per="server",
    beyond="the connection is refused with 503; half of them are kept for all else",
)
