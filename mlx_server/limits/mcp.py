"""Limits on MCP servers."""

from mlx_server.limits.limit import Limit

MCP_SERVERS = Limit("MCP servers that a request names", 16, "items", "request", beyond="400")
MCP_RESPONSES = Limit(
    "responses that use MCP servers at a time", 64, "items", "server", beyond="503"
)
MCP_PROCESSES = Limit(
    bounds="MCP servers that run as child processes, each with a guard",
    value=32,
    unit="processes",
    per="server",
    beyond="it waits for MCP_WAIT_SECONDS, then 503",
)
MCP_SESSIONS = Limit(
    bounds="sessions with MCP servers over HTTP",
    value=64,
    unit="sockets",
    per="server",
    beyond="it waits for MCP_WAIT_SECONDS, then 503",
)
MCP_WAIT_SECONDS = Limit(
    bounds="how long a request waits while other requests use all processes or sessions",
    value=10,
    unit="seconds",
    per="request",
    beyond="503",
)
MCP_OPEN_SECONDS = Limit(
    bounds="how long connecting to an MCP server and listing its tools may take",
    value=30,
    unit="seconds",
    per="request",
    beyond="the server has no tools in this response",
)
MCP_CALL_SECONDS = Limit(
    bounds="how long a call of an MCP server's tool may take",
    value=30,
    unit="seconds",
    per="request",
    beyond="the call fails, and the model gets an error as its result",
)
MCP_TOOLS = Limit(
    bounds="tools of one MCP server",
    value=256,
    unit="items",
    per="request",
    beyond="the rest is left out of the list, with a note",
)
MCP_SCHEMA_BYTES = Limit(
    bounds="names, descriptions and schemas of the tools of one MCP server",
    value=256 << 10,
    unit="bytes",
    per="request",
    beyond="the rest is left out of the list, with a note",
)
MCP_ALL_TOOLS = Limit(
    bounds="tools of all MCP servers of a request",
    value=512,
    unit="items",
    per="request",
    beyond="the rest is left out of the list, with a note",
)
MCP_ALL_SCHEMA_BYTES = Limit(
    bounds="names, descriptions and schemas of all tools of MCP servers",
    value=1 << 20,
    unit="bytes",
    per="request",
    beyond="the rest is left out of the list, with a note",
)
MCP_CALLS = Limit(
    bounds="calls of MCP servers' tools, approved ones included",
    value=128,
    unit="items",
    per="request",
    beyond="further calls are ignored; 400 for more approvals",
)
MCP_PARALLEL_CALLS = Limit(
    bounds="calls of MCP servers' tools that run at a time",
    value=8,
    unit="items",
    per="request",
    beyond="further calls wait",
)
MCP_ROUNDS = Limit(
    bounds="rounds of an answer in which tools are run",
    value=10,
    unit="items",
    per="request",
    beyond="a last round has no tools",
)
MCP_ROUND_SECONDS = Limit(
    bounds="the time after which no further round of an answer has tools",
    value=600,
    unit="seconds",
    per="request",
    beyond="a last round has no tools",
)
MCP_RESULT_BYTES = Limit(
    bounds="the result of a call, as the model gets it",
    value=1 << 20,
    unit="bytes",
    per="request",
    beyond="it is truncated, and says so",
)
MCP_ALL_RESULT_BYTES = Limit(
    bounds="the results of all calls, as the model gets them",
    value=8 << 20,
    unit="bytes",
    per="request",
    beyond="they are truncated, and say so",
)
MCP_MESSAGE_BYTES = Limit(
    bounds="a message from an MCP server",
    value=8 << 20,
    unit="bytes",
    per="connection",
    beyond="the connection is closed",
)
MCP_MESSAGE_BRACKETS = Limit(
    bounds="opening brackets in a message from an MCP server, and a quarter of its quotes and "
    "commas, because parsing millions of values would block other requests",
    value=1 << 18,
    unit="items",
    per="connection",
    beyond="the connection is closed",
)
MCP_SESSION_BYTES = Limit(
    bounds="all messages from an MCP server together",
    value=64 << 20,
    unit="bytes",
    per="connection",
    beyond="the connection is closed",
)
MCP_ERROR_CHARACTERS = Limit(
    "an MCP server's error message", 500, "items", "request", beyond="it is truncated"
)
TOOL_NAME_CHARACTERS = Limit(
    bounds="the name of an MCP server's tool",
    value=128,
    unit="characters",
    per="request",
    beyond="the tool is left out of the list, with a note",
)
MCP_UNREAD_MESSAGES = Limit(
    bounds="messages to an MCP server that it has not read yet",
    value=64,
    unit="items",
    per="connection",
    beyond="the next one waits, for as long as a call may take",
)
MCP_OPENINGS = Limit(
    bounds="sessions that are opened with an MCP server for one request",
    value=2,
    unit="items",
    per="request",
    beyond="its further calls fail, and the model gets an error as their result",
)
MCP_RESOLVERS = Limit(
    bounds="threads that resolve the host names of MCP servers",
    value=8,
    unit="threads",
    per="server",
    beyond="further lookups wait, for MCP_OPEN_SECONDS at most",
)
