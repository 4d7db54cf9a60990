"""MCP servers."""

from mlx_server.limits.limit import Limit

MCP_SERVERS = Limit(
    bounds="MCP servers that a request names",
    value=16,
    unit="items",
    per="request",
    beyond="400",
)
MCP_RESPONSES = Limit(
    bounds="responses that use MCP servers at a time",
    value=64,
    unit="items",
    per="server",
    beyond="503",
)
MCP_PROCESSES = Limit(
    bounds="MCP servers that are processes of ours, each with two guards",
    value=32,
    unit="processes",
    per="server",
    beyond="waits for MCP_WAIT_SECONDS, then 503",
)
MCP_SESSIONS = Limit(
    bounds="sessions with MCP servers that are reached by HTTP",
    value=64,
    unit="sockets",
    per="server",
    beyond="waits for MCP_WAIT_SECONDS, then 503",
)
MCP_WAIT_SECONDS = Limit(
    bounds="how long a request waits for a place among MCP servers",
    value=10,
    unit="seconds",
    per="request",
    beyond="503",
)
MCP_OPEN_SECONDS = Limit(
    bounds="how long an MCP server may take to be reached and to list its tools",
    value=30,
    unit="seconds",
    per="request",
    beyond="the server has no tools in this response",
)
MCP_CALL_SECONDS = Limit(
    bounds="how long a call of a tool may take",
    value=30,
    unit="seconds",
    per="request",
    beyond="the call fails, and the model is told",
)
MCP_TOOLS = Limit(
    bounds="tools of one MCP server",
    value=256,
    unit="items",
    per="request",
    beyond="the rest is left out of the list, which says so",
)
MCP_SCHEMA_BYTES = Limit(
    bounds="names, descriptions and schemas of the tools of one MCP server",
    value=256 << 10,
    unit="bytes",
    per="request",
    beyond="the rest is left out of the list, which says so",
)
MCP_ALL_TOOLS = Limit(
    bounds="tools of all MCP servers of a request",
    value=512,
    unit="items",
    per="request",
    beyond="the rest is left out of the list, which says so",
)
MCP_ALL_SCHEMA_BYTES = Limit(
    bounds="names, descriptions and schemas of all tools of MCP servers",
    value=1 << 20,
    unit="bytes",
    per="request",
    beyond="the rest is left out of the list, which says so",
)
MCP_CALLS = Limit(
    bounds="calls of tools of MCP servers, approved ones included",
    value=128,
    unit="items",
    per="request",
    beyond="further calls are ignored; 400 for more approvals",
)
MCP_PARALLEL_CALLS = Limit(
    bounds="calls of such tools that run at a time",
    value=8,
    unit="items",
    per="request",
    beyond="they wait for each other",
)
MCP_ROUNDS = Limit(
    bounds="rounds of an answer in which tools are run",
    value=10,
    unit="items",
    per="request",
    beyond="a last round has no tools",
)
MCP_ROUND_SECONDS = Limit(
    bounds="time after which no other round of an answer has tools",
    value=600,
    unit="seconds",
    per="request",
    beyond="a last round has no tools",
)
MCP_RESULT_BYTES = Limit(
    bounds="a result of a tool, as the model gets it",
    value=1 << 20,
    unit="bytes",
    per="request",
    beyond="it is cut, and says so",
)
MCP_ALL_RESULT_BYTES = Limit(
    bounds="all results of tools, as the model gets them",
    value=8 << 20,
    unit="bytes",
    per="request",
    beyond="they are cut, and say so",
)
MCP_MESSAGE_BYTES = Limit(
    bounds="a message of an MCP server, as it comes",
    value=8 << 20,
    unit="bytes",
    per="connection",
    beyond="the connection is closed",
)
MCP_SESSION_BYTES = Limit(
    bounds="all that an MCP server sends",
    value=64 << 20,
    unit="bytes",
    per="connection",
    beyond="the connection is closed",
)
MCP_ERROR_CHARACTERS = Limit(
    bounds="what an MCP server says of an error",
    value=500,
    unit="items",
    per="request",
    beyond="it is cut",
)
TOOL_NAME_CHARACTERS = Limit(
    bounds="the name of an MCP server's tool",
    value=128,
    unit="characters",
    per="request",
    beyond="the tool is left out of the list, which says so",
)
MCP_UNREAD_MESSAGES = Limit(
    bounds="messages to an MCP server that does not read them",
    value=64,
    unit="items",
    per="connection",
    beyond="the next one waits, for as long as a call may take",
)
MCP_OPENINGS = Limit(
    bounds="times that an MCP server is opened for a request",
    value=2,
    unit="items",
    per="request",
    beyond="its further calls fail, and the model is told",
)
MCP_RESOLVERS = Limit(
    bounds="threads that look up the names of MCP servers",
    value=8,
    unit="threads",
    per="server",
    beyond="they wait, for as long as an MCP server may take",
)
