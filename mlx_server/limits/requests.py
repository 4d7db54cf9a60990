"""Limits on the form of requests, and on the work of reading them."""

from mlx_server.limits.limit import Limit

# A request's body

BODY_BYTES = Limit(
    bounds="a request's body, and a message on a WebSocket",
    value=16 << 20,
    unit="bytes",
    per="request",
    beyond="413",
    setting="server.max_body_bytes",
)
JSON_DEPTH = Limit("nested lists and objects", 64, "items", "request", beyond="400")
JSON_NODES = Limit(
    bounds="lists and objects, because millions of them would block other requests",
    value=1 << 16,
    unit="items",
    per="request",
    beyond="400",
)
JSON_STRINGS = Limit("strings, keys included", 1 << 18, "items", "request", beyond="400")
JSON_DIGITS = Limit("digits of a whole number", 400, "items", "request", beyond="400")
NAME_CHARACTERS = Limit("the name of a schema", 64, "characters", "request", beyond="400")
ANSWERS = Limit("answers that one request asks for with `n`", 16, "items", "request", beyond="400")
PROMPTS = Limit(
    "prompts of one request to `/v1/completions`", 128, "items", "request", beyond="400"
)
TOKENIZED = Limit(
    bounds="tokens of one request to `/tokenize` or `/detokenize`",
    value=1 << 20,
    unit="tokens",
    per="request",
    beyond="400",
)
EMBEDDING_INPUTS = Limit(
    bounds="inputs of one request for embeddings, or documents of one for ranks",
    value=2048,
    unit="items",
    per="request",
    beyond="400",
)
EMBEDDED_TOKENS = Limit(
    bounds="tokens of the inputs of one request for embeddings or ranks",
    value=1 << 20,
    unit="tokens",
    per="request",
    beyond="400",
)
STOP_STRINGS = Limit("stop strings", 64, "items", "request", beyond="400")
STOP_CHARACTERS = Limit("a stop string", 1024, "characters", "request", beyond="400")
LOGIT_BIASES = Limit("tokens in `logit_bias`", 4096, "items", "request", beyond="400")
TOP_LOGPROBS = Limit(
    bounds="`top_logprobs` and `logprobs`, the alternatives to each token",
    value=20,
    unit="items",
    per="request",
    beyond="400",
)
METADATA = Limit("pairs in `metadata`", 16, "items", "request", beyond="400")
METADATA_KEY_CHARACTERS = Limit("a key in `metadata`", 64, "characters", "request", beyond="400")
METADATA_VALUE_CHARACTERS = Limit(
    "a value in `metadata`", 512, "characters", "request", beyond="400"
)
LABEL_CHARACTERS = Limit(
    bounds="`user`, `safety_identifier` and `prompt_cache_key` of a response",
    value=1024,
    unit="characters",
    per="request",
    beyond="400",
)
LANE_CHARACTERS = Limit(
    "the name of a WebSocket's lane", 256, "characters", "request", beyond="an error event"
)
REQUEST_ID_CHARACTERS = Limit(
    bounds="a client's `x-request-id`",
    value=128,
    unit="characters",
    per="request",
    beyond="the server generates an id instead",
)
ADAPTER_PATH_CHARACTERS = Limit(
    "the path of an adapter that a client loads", 4096, "characters", "request", beyond="400"
)
PAGE_ITEMS = Limit("items of a page, which `limit` sets", 100, "items", "request", beyond="400")
ADDED_ITEMS = Limit(
    "items that one request adds to a conversation", 20, "items", "request", beyond="400"
)
IGNORED_NAMES = Limit(
    bounds="ignored fields that the response header lists",
    value=1000,
    unit="items",
    per="request",
    beyond="the rest is not listed",
)
IGNORED_NAME_CHARACTERS = Limit(
    bounds="the name of an ignored field in that header",
    value=64,
    unit="characters",
    per="request",
    beyond="it is truncated",
)
IGNORED_HEADER_CHARACTERS = Limit(
    "the header that lists ignored fields", 2048, "characters", "request", beyond="it is truncated"
)

# What a request offers to the model

TOOLS = Limit(
    "tools of a request, those of MCP servers not included", 128, "items", "request", beyond="400"
)
RESPONSE_TOOLS = Limit(
    bounds="entries of `tools` of a response, ignored ones included",
    value=1024,
    unit="items",
    per="request",
    beyond="400",
)
TOOL_SCHEMA_BYTES = Limit(
    bounds="the parameters of all tools together, which become one grammar",
    value=1 << 20,
    unit="bytes",
    per="request",
    beyond="400",
)
MCP_LABEL_CHARACTERS = Limit(
    bounds="the label of an MCP server, and the name of a connector",
    value=256,
    unit="characters",
    per="request",
    beyond="400",
)
MCP_URL_CHARACTERS = Limit("the URL of an MCP server", 2048, "characters", "request", beyond="400")
MCP_HEADERS = Limit("headers for an MCP server", 64, "items", "request", beyond="400")
MCP_FILTER_NAMES = Limit(
    "tool names in one filter of an MCP server's tools", 4096, "items", "request", beyond="400"
)

# Reading, rendering and tokenising a request

REQUEST_THREADS = Limit(
    bounds="threads that parse, render and tokenise requests",
    value=6,
    unit="threads",
    per="server",
    beyond="it waits, small requests before large ones",
)
LARGE_REQUEST_THREADS = Limit(
    "those of these threads that work for large requests", 2, "threads", "server", beyond="it waits"
)
MODEL_REQUEST_THREADS = Limit(
    "those of these threads that render for one model", 3, "threads", "model", beyond="it waits"
)
LARGE_REQUEST_BYTES = Limit(
    bounds="the body of a request that does not count as large",
    value=256 << 10,
    unit="bytes",
    per="request",
    beyond="it shares two threads with other large requests",
)
UNREAD_REQUEST_BYTES = Limit(
    bounds="the bodies of requests that these threads work for, or that wait for one",
    value=256 << 20,
    unit="bytes",
    per="server",
    beyond="503 overloaded",
)
PROMPT_TEXT_BYTES = Limit(
    bounds="the text of a conversation, tools and options included, as it lies in memory (1, 2 or "
    "4 bytes a character, by the widest of each text), for a context of 64k tokens or less; for a "
    "longer context, 24 bytes for each of its tokens",
    value=24 << 16,
    unit="bytes",
    per="request",
    beyond="400 context_length_exceeded",
)
ARGUMENT_ITEMS = Limit(
    bounds="commas and opening brackets in an earlier call's arguments that a chat template gets "
    "as an object",
    value=1 << 17,
    unit="items",
    per="request",
    beyond="the template gets the arguments as text",
)
