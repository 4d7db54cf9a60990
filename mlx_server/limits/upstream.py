"""Limits on models that are served elsewhere."""

from mlx_server.limits.limit import Limit

UPSTREAM_LINE_BYTES = Limit(
    bounds="a line of an upstream's stream, or its answer as one body",
    value=8 << 20,
    unit="bytes",
    per="response",
    beyond="the answer ends with an error",
)
UPSTREAM_MEMORY = Limit(
    bounds="memory for an upstream's answer, reckoned as four times the bytes that are received",
    value=512 << 20,
    unit="bytes",
    per="response",
    beyond="the answer ends with an error",
)
UPSTREAM_ALL_MEMORY = Limit(
    bounds="the same memory for all upstreams' answers that run",
    value=2 << 30,
    unit="bytes",
    per="server",
    beyond="answers with more than an equal share end with an error",
)
UPSTREAM_HEADER_BYTES = Limit(
    bounds="the headers of an upstream's or MCP server's response, with those of informational "
    "responses before it",
    value=64 << 10,
    unit="bytes",
    per="response",
    beyond="the connection is closed",
)
UPSTREAM_CHARACTERS = Limit(
    bounds="the text, reasoning and calls of an upstream's answer",
    value=4 << 20,
    unit="characters",
    per="response",
    beyond="the answer ends with an error",
)
UPSTREAM_CALLS = Limit(
    bounds="the calls of an upstream's answer, in fields of their own or in its text",
    value=256,
    unit="items",
    per="response",
    beyond="the answer ends with an error",
)
UPSTREAM_ERROR_BYTES = Limit(
    bounds="the body of an upstream's error or token",
    value=64 << 10,
    unit="bytes",
    per="response",
    beyond="the rest is not read",
)
UPSTREAM_CONNECTIONS = Limit(
    bounds="connections to one upstream",
    value=128,
    unit="sockets",
    per="model",
    beyond="it waits for a free one, then 503",
)
UPSTREAM_HOPS = Limit(
    bounds="servers of this kind that pass a request on, one to the next",
    value=4,
    unit="items",
    per="request",
    beyond="508 upstream_loop",
)
UPSTREAM_CONNECT_SECONDS = Limit(
    bounds="how long connecting to an upstream may take",
    value=10,
    unit="seconds",
    per="request",
    beyond="it is tried again, then 504",
    setting="models.*.upstream.connect_seconds",
)
UPSTREAM_FIRST_SECONDS = Limit(
    bounds="how long an upstream may take until its answer begins",
    value=300,
    unit="seconds",
    per="request",
    beyond="504",
    setting="models.*.upstream.first_seconds",
)
UPSTREAM_IDLE_SECONDS = Limit(
    bounds="how long nothing may be added to an upstream's answer that has begun",
    value=60,
    unit="seconds",
    per="response",
    beyond="the answer ends with an error",
    setting="models.*.upstream.idle_seconds",
)
UPSTREAM_ANSWER_SECONDS = Limit(
    bounds="how long an upstream's answer may take in all, also in the background",
    value=3600,
    unit="seconds",
    per="response",
    beyond="the answer ends with an error",
    setting="models.*.upstream.answer_seconds",
)
UPSTREAM_RETRIES = Limit(
    bounds="how often a request is sent again that an upstream refused or lost",
    value=2,
    unit="items",
    per="request",
    beyond="the next fallback, or 502 to 504",
    setting="models.*.upstream.retries",
)
UPSTREAM_PAUSE_SECONDS = Limit(
    bounds="the pause that an upstream may ask for with Retry-After",
    value=30,
    unit="seconds",
    per="request",
    beyond="the request is not sent again",
)
