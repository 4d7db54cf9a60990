"""The limits on all that a client, a model or another server can make grow, one a line.

`python -m mlx_server.limits` prints the table that is .github/LIMITS.md. A limit that models.yaml
can change has its default here and names its setting.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Unit = Literal[
    "bytes", "seconds", "tokens", "items", "rows", "sockets", "processes", "threads", "characters"
]
Per = Literal[
    "request", "connection", "client", "key", "model", "server", "response", "conversation"
]


@dataclass(frozen=True)
class Limit:
    value: int
    unit: Unit
    per: Per
    bounds: str
    """A noun phrase that names the quantity that can't grow beyond `value`."""
    beyond: str
    """The effect beyond the limit: the response's status, or what is dropped, closed or left out."""
    setting: str
    """The key in models.yaml that changes the value."""


SECTIONS: dict[str, list[Limit]] = {}
"""The table, in the order in which a request comes to its parts."""


def _section(title: str) -> None:
    SECTIONS[title] = []


def _limit(value: int, unit: Unit, per: Per, bounds: str, beyond: str, setting: str = "") -> int:
    list(SECTIONS.values())[-1].append(Limit(value, unit, per, bounds, beyond, setting))
    return value


# fmt: off
_section("Connections")
CONNECTIONS                    = _limit(1024,         "sockets",    "server",     "open connections, and at most half of the process's descriptors", "the longest idle one is closed; if none is idle, 503 and the new one is closed")
CONNECTIONS_PER_ADDRESS        = _limit(768,           "sockets",    "client",     "open connections from one address (one /64 network of IPv6); at most three in four", "its longest idle one is closed; if none is idle, 503 and the new one is closed")
IDLE_SECONDS                   = _limit(5,             "seconds",    "connection", "the time for which a connection stays open without a request", "it is closed")
RECEIVE_SECONDS                = _limit(30,            "seconds",    "request",    "the time in which a request (head and body) or a WebSocket's handshake must arrive", "the connection is closed", "server.receive_seconds")
SEND_SECONDS                   = _limit(30,            "seconds",    "connection", "the time in which a client must read some of the data sent to it", "the connection is closed")
HEAD_BYTES                     = _limit(64 << 10,      "bytes",      "request",    "a request's head, the head of one chunk of a body, and the trailers after a body", "400 and the connection is closed")
HEADERS                        = _limit(256,           "items",      "request",    "the header lines of a request", "400 and the connection is closed")
SMALL_CHUNKS                   = _limit(4096,         "items",      "request",    "chunks of a body with less than 256 bytes", "400 and the connection is closed")
PIPELINED_BYTES                = _limit(64 << 10,      "bytes",      "connection", "further requests that a client sends before its answer is complete", "the connection is closed")
SEND_BUFFER_BYTES              = _limit(128 << 10,     "bytes",      "connection", "the kernel's send buffer for an unread answer, which Linux doubles", "the answer waits, for 30 seconds at most")
DESCRIPTORS                    = _limit(8192,         "sockets",    "server",     "files and sockets that the process may open, if its hard limit allows it", "503 for the connection; half of them are reserved for other uses")
RESTART_SECONDS                = _limit(600,           "seconds",    "server",     "how long a new server may take to start and to load its models, in a restart", "it is ended, and the old one goes on")
LEAVING_SECONDS                = _limit(3600,         "seconds",    "server",     "how long a server that was replaced may take to end its answers", "they end with an error, as at SIGTERM")

_section("WebSockets")
SOCKETS                        = _limit(128,           "sockets",    "server",     "open WebSockets; a quarter of the process's descriptors, if that is less", "503 at the handshake")
SOCKETS_PER_CLIENT             = _limit(64,            "sockets",    "client",     "open WebSockets of one client; half of those of the server, if that is less", "503 at the handshake")
SOCKET_FRAMES                  = _limit(8,             "items",      "connection", "messages that wait for an earlier response to end", "closed with 1008")
SMALL_FRAMES                   = _limit(2048,          "items",      "connection", "pings, pongs and fragments of less than 256 bytes before a message is complete", "closed with 1008")
SOCKET_BYTES                   = _limit(256 << 10,     "bytes",      "connection", "bytes of messages that wait or arrive, except for one large message", "no more is read until there is room")
FRAME_BYTES                    = _limit(32 << 20,      "bytes",      "server",     "bytes of large WebSocket messages that arrive or are being read; one is always allowed", "no more of it is read until there is room")
SOCKET_MEMORY_BYTES            = _limit(16 << 20,      "bytes",      "connection", "responses with `store: false` that a connection remembers, in bytes", "the oldest is dropped")
SOCKETS_MEMORY_BYTES           = _limit(256 << 20,     "bytes",      "server",     "responses with `store: false` that all connections remember, in bytes", "it is not remembered")
SOCKET_RESPONSES               = _limit(4,             "items",      "connection", "responses with `store: false` that a connection remembers", "the oldest is dropped")
SOCKET_IDLE_SECONDS            = _limit(600,           "seconds",    "connection", "time without a request", "closed with 1001")
SOCKET_SECONDS                 = _limit(3600,         "seconds",    "connection", "age of a WebSocket", "closed")

_section("Requests")
BODY_BYTES                     = _limit(16 << 20,      "bytes",      "request",    "a request's body, and a message on a WebSocket", "413", "server.max_body_bytes")
JSON_DEPTH                     = _limit(64,            "items",      "request",    "nested lists and objects", "400")
JSON_NODES                     = _limit(1 << 16,       "items",      "request",    "lists and objects, because millions of them would block other requests", "400")
JSON_STRINGS                   = _limit(1 << 18,       "items",      "request",    "strings, keys included", "400")
JSON_DIGITS                    = _limit(400,           "items",      "request",    "digits of a whole number", "400")
NAME_CHARACTERS                = _limit(64,            "characters", "request",    "the name of a schema", "400")
ANSWERS                        = _limit(16,            "items",      "request",    "answers that one request asks for with `n`", "400")
PROMPTS                        = _limit(128,           "items",      "request",    "prompts of one request to `/v1/completions`", "400")
INFILL_FILES                   = _limit(256,           "items",      "request",    "`input_extra` of one request to `/infill`", "400")
TOKENIZED                      = _limit(1 << 20,       "tokens",     "request",    "tokens of one request to `/tokenize` or `/detokenize`", "400")
EMBEDDING_INPUTS               = _limit(2048,         "items",      "request",    "inputs of one request for embeddings, or documents of one for ranks", "400")
EMBEDDED_TOKENS                = _limit(1 << 20,       "tokens",     "request",    "tokens of the inputs of one request for embeddings or ranks", "400")
STOP_STRINGS                   = _limit(64,            "items",      "request",    "stop strings", "400")
STOP_CHARACTERS                = _limit(1024,         "characters", "request",    "a stop string", "400")
LOGIT_BIASES                   = _limit(4096,         "items",      "request",    "tokens in `logit_bias`", "400")
TOP_LOGPROBS                   = _limit(20,            "items",      "request",    "`top_logprobs` and `logprobs`, the alternatives to each token", "400")
KEPT_LOGPROBS                  = _limit(1 << 20,       "items",      "request",    "log probabilities, alternatives included, of a response that is sent or stored as a whole, and those of its prompts", "400")
METADATA                       = _limit(16,            "items",      "request",    "pairs in `metadata`", "400")
METADATA_KEY_CHARACTERS        = _limit(64,            "characters", "request",    "a key in `metadata`", "400")
METADATA_VALUE_CHARACTERS      = _limit(512,           "characters", "request",    "a value in `metadata`", "400")
LABEL_CHARACTERS               = _limit(1024,         "characters", "request",    "`user`, `safety_identifier` and `prompt_cache_key` of a response", "400")
REQUEST_ID_CHARACTERS          = _limit(128,           "characters", "request",    "a client's `x-request-id`", "the server generates an id instead")
ADAPTER_PATH_CHARACTERS        = _limit(4096,         "characters", "request",    "the path of an adapter that a client loads", "400")
PAGE_ITEMS                     = _limit(100,           "items",      "request",    "items of a page, which `limit` sets", "400")
ADDED_ITEMS                    = _limit(20,            "items",      "request",    "items that one request adds to a conversation", "400")
IGNORED_NAMES                  = _limit(1000,         "items",      "request",    "ignored fields that the response header lists", "the rest is not listed")
IGNORED_NAME_CHARACTERS        = _limit(64,            "characters", "request",    "the name of an ignored field in that header", "it is truncated")
IGNORED_HEADER_CHARACTERS      = _limit(2048,         "characters", "request",    "the header that lists ignored fields", "it is truncated")
TOOLS                          = _limit(512,           "items",      "request",    "tools of a request, those of MCP servers not included", "400")
RESPONSE_TOOLS                 = _limit(1024,         "items",      "request",    "entries of `tools` of a response, ignored ones included", "400")
TOOL_SCHEMA_BYTES              = _limit(1 << 20,       "bytes",      "request",    "the parameters of all tools together, which become one grammar", "400")
MCP_LABEL_CHARACTERS           = _limit(256,           "characters", "request",    "the label of an MCP server, and the name of a connector", "400")
MCP_URL_CHARACTERS             = _limit(2048,         "characters", "request",    "the URL of an MCP server", "400")
MCP_HEADERS                    = _limit(64,            "items",      "request",    "headers for an MCP server", "400")
MCP_FILTER_NAMES               = _limit(4096,         "items",      "request",    "tool names in one filter of an MCP server's tools", "400")
REQUEST_THREADS                = _limit(6,             "threads",    "server",     "threads that parse, render and tokenise requests", "it waits, small requests before large ones")
LARGE_REQUEST_THREADS          = _limit(2,             "threads",    "server",     "those of these threads that work for requests of more than 256 KiB", "it waits")
MODEL_REQUEST_THREADS          = _limit(3,             "threads",    "model",      "those of these threads that render for one model", "it waits")
OTHERS_REQUEST_THREADS         = _limit(1,             "threads",    "client",     "of these threads, of those for large requests and of those for one model: kept for other clients than one that has the rest", "it waits")
UNREAD_REQUEST_BYTES           = _limit(256 << 20,     "bytes",      "server",     "the bodies of requests that these threads work for, or that wait for one", "503 overloaded")
PROMPT_TEXT_BYTES              = _limit(24 << 16,      "bytes",      "request",    "the text of a conversation, tools and options included, as it lies in memory (1, 2 or 4 bytes a character, by the widest of each text), for a context of 64k tokens or less; for a longer context, 24 bytes for each of its tokens", "400 context_length_exceeded")
ARGUMENT_ITEMS                 = _limit(1 << 17,       "items",      "request",    "commas and opening brackets in an earlier call's arguments that a chat template gets as an object", "the template gets the arguments as text")

_section("Chat templates")
COMPILED_TEMPLATES             = _limit(32,            "items",      "server",     "compiled chat templates that a process keeps", "the least recently used is dropped")
TEMPLATE_PROCESSES             = _limit(8,             "processes",  "server",     "processes that render chat templates", "it waits for one")
IDLE_TEMPLATE_PROCESSES        = _limit(2,             "processes",  "server",     "idle processes that render chat templates", "it ends")
TEMPLATE_SECONDS               = _limit(2,             "seconds",    "request",    "processor time of one rendering, which may take four times as long by the clock", "400, or 503 on a machine too busy to give it that time, and the process is killed")
TEMPLATE_MEMORY                = _limit(512 << 20,     "bytes",      "server",     "memory of a process that renders chat templates", "400, and the process is killed")
TEMPLATE_CHARACTERS            = _limit(32 << 20,      "characters", "request",    "the prompt that a chat template renders", "400")
TEMPLATE_SOURCE                = _limit(1 << 20,       "characters", "model",      "the source of a chat template", "500 model_unusable")
SCHEMA_PROMPT_TOKENS           = _limit(2048,         "tokens",     "request",    "the schema of an answer in its prompt, and at most an eighth of the context", "the prompt does not describe it, and `x-mlx-server-ignored` has `schema_in_prompt`")

_section("Schemas and grammars")
SCHEMA_BYTES                   = _limit(256 << 10,     "bytes",      "request",    "a JSON schema", "400")
SCHEMA_DEPTH                   = _limit(96,            "items",      "request",    "levels of objects and arrays within a schema", "400")
SCHEMA_NODES                   = _limit(20_000,        "items",      "request",    "objects and arrays in a schema", "400")
SCHEMA_PROPERTIES              = _limit(500,           "items",      "request",    "names in one `properties` or `required`", "400")
SCHEMA_VALUES                  = _limit(10_000,        "items",      "request",    "values of one `enum`", "400")
SCHEMA_COUNT                   = _limit(10_000,        "items",      "request",    "`minItems`, `maxItems` and other counts except `maxLength`", "400")
SCHEMA_TEXT_LENGTH             = _limit(2 ** 31,       "characters", "request",    "`maxLength`, because the compiler counts in 32 bits", "400")
SCHEMA_MULTIPLES               = _limit(10_000,        "items",      "request",    "the digits of `multipleOf`, read as a whole number", "400")
SCHEMA_JOINED_PATTERNS         = _limit(8,             "items",      "request",    "patterns that one text has to match at once", "if the schema is strict, 400; otherwise such patterns are not enforced, and the answer says so")
SCHEMA_CHOICES                 = _limit(10_000,        "items",      "request",    "alternatives in a schema, counted through its references", "if the schema is strict, 400; otherwise they are not enforced, and the answer says so")
SCHEMA_VARIANTS                = _limit(32,            "items",      "request",    "variants of one object's schema that a grammar distinguishes", "fewer variants are distinguished")
SCHEMA_VARIANT_MEMBERS         = _limit(600,           "items",      "request",    "members in all these variants together", "fewer variants are distinguished")
PATTERN_CHARACTERS             = _limit(2000,         "characters", "request",    "a regular expression in a schema or grammar", "400")
PATTERN_REPEATS                = _limit(10_000,        "items",      "request",    "a count of repetitions in a regular expression", "400")
PATTERN_STATES                 = _limit(50_000,        "characters", "request",    "a regular expression with its repetitions written out", "400")
PATTERN_DEPTH                  = _limit(60,            "items",      "request",    "nested groups in a regular expression", "400")
COMPILED_SCHEMAS               = _limit(128,           "items",      "server",     "compiled or refused schemas in the cache", "the least recently used is dropped")
SCHEMA_PROCESSES               = _limit(6,             "processes",  "server",     "processes that compile schemas and check answers", "it waits for one")
CLIENT_SCHEMA_PROCESSES        = _limit(2,             "processes",  "client",     "those of one client", "it waits for one")
IDLE_SCHEMA_PROCESSES          = _limit(1,             "processes",  "server",     "idle processes that compile schemas", "it ends")
SCHEMA_SECONDS                 = _limit(2,             "seconds",    "request",    "processor time to compile a schema, which may take four times as long by the clock", "503, as what else the machine does counts too, and the process is killed")
SCHEMA_MEMORY                  = _limit(256 << 20,     "bytes",      "server",     "memory of a process that compiles schemas", "400, and the process is killed")
CHOICES                        = _limit(10_000,        "items",      "request",    "options of `choice`", "400")
CHOICE_CHARACTERS              = _limit(256 << 10,     "characters", "request",    "all options of `choice` together", "400")
GRAMMAR_CHARACTERS             = _limit(128 << 10,     "characters", "request",    "a grammar that a client writes", "400")
GRAMMAR_RULES                  = _limit(500,           "items",      "request",    "rules of a grammar that a client writes", "400")
GRAMMAR_INTERSECTIONS          = _limit(8,             "items",      "request",    "intersections (`&`) in a grammar, each of which may double the work", "400")
GRAMMAR_DEPTH                  = _limit(48,            "items",      "request",    "nested brackets in a grammar", "400")
WHOLE_GRAMMAR_CHARACTERS       = _limit(4 << 20,       "characters", "request",    "the grammar of an answer, with all its tools", "400")
WHOLE_GRAMMAR_RULES            = _limit(4096,         "items",      "request",    "rules of the grammar of an answer, as many as fit the compiler's stack", "400")
COMPILE_SECONDS                = _limit(5,             "seconds",    "request",    "the time to compile a grammar", "503")
COMPILE_THREADS                = _limit(2,             "threads",    "client",     "grammars that are compiled at a time, without those that take more than half a second; and as many of those of a client", "the client's further grammars wait; 503 while its slow ones are past their time")
SLOW_COMPILE_THREADS           = _limit(8,             "threads",    "server",     "grammars that are compiled at a time, the slow ones of all clients included", "further grammars wait; 503 while all of these are past their time")
COMPILED_GRAMMARS              = _limit(64,            "items",      "server",     "compiled or refused grammars in the cache", "the least recently used is dropped")
GRAMMAR_ITEMS_IN_ROW           = _limit(4000,         "items",      "request",    "items in a row of the grammar's parser", "the row fails; others go on")
GRAMMAR_FIRST_STEPS            = _limit(1_000_000,     "items",      "request",    "steps of the grammar's lexer before the first token", "400")
GRAMMAR_STEPS                  = _limit(200_000,       "items",      "request",    "steps of the grammar's lexer for each token", "the row fails; others go on")
GRAMMAR_STEP_ITEMS             = _limit(200_000,       "items",      "request",    "items of the grammar's parser for each token", "the row fails; others go on")
GRAMMAR_TOKEN_SECONDS          = _limit(10,            "seconds",    "request",    "the time to compute which tokens a grammar allows next, in a thread of its own", "the row fails; others go on")
MASK_THREADS                   = _limit(2,             "threads",    "server",     "threads that compute this for slow grammars, one for each client at a time", "further rows with slow grammars wait; others go on")
GRAMMAR_STATES                 = _limit(100_000,       "items",      "request",    "states of the grammar's lexer", "the row fails; others go on")
GRAMMAR_SIZE                   = _limit(200_000,       "items",      "request",    "symbols of a compiled grammar", "400")

_section("Answers")
CONCURRENCY                    = _limit(16,            "rows",       "server",     "rows in one batch", "further rows wait in the queue", "server.concurrency")
WAIT_SECONDS                   = _limit(300,           "seconds",    "request",    "how long a request waits for memory that other requests use", "503 with Retry-After")
ANSWER_TOKENS                  = _limit(16_384,        "tokens",     "request",    "an answer for which neither the request nor models.yaml sets a limit", "it ends with the finish reason `length`")
CORRECTION_TOKENS              = _limit(1024,         "tokens",     "request",    "the message that lists the errors of an answer when it is generated again", "it is not generated again")
UNREAD_BYTES                   = _limit(128 << 10,     "bytes",      "request",    "tokens of an answer that its client has not read yet", "its rows pause until they are read")
CALL_DEPTH                     = _limit(64,            "items",      "response",   "nested values in the arguments of a tool call", "the text is not read as a call")
TEXT_SCHEMA_DEPTH              = _limit(64,            "items",      "response",   "nested schemas that describe one argument written as text", "deeper ones may be any text")
HARMONY_REFERENCES             = _limit(32,            "items",      "request",    "references followed to describe one tool in a Harmony prompt", "further ones are described as `any`")
HARMONY_DEPTH                  = _limit(32,            "items",      "request",    "levels of a schema in a tool's description in a Harmony prompt", "deeper ones are described as `any`")
HARMONY_PARAMETERS             = _limit(1 << 18,       "characters", "request",    "the parameters of one tool in a Harmony prompt, with what they refer to", "400")
HARMONY_HEADER_TOKENS          = _limit(128,           "tokens",     "response",   "the header of a Harmony message", "it counts as text")
READ_JSON_CHARACTERS           = _limit(4 << 20,       "characters", "response",   "JSON in an answer that is parsed at all", "it stays as the model wrote it")
REPAIRED_JSON_CHARACTERS       = _limit(256 << 10,     "characters", "response",   "JSON in which syntax errors are repaired", "it stays as the model wrote it")
REPAIRED_JSON_STEPS            = _limit(50_000_000,    "items",      "response",   "the characters of JSON to be repaired, times the places where a value may end", "it stays as the model wrote it")
COERCED_DEPTH                  = _limit(16,            "items",      "response",   "levels of a schema by which values are coerced (`$ref` can make them endless)", "deeper values stay as they are")
COERCED_PARTS                  = _limit(256,           "items",      "response",   "parts of a schema by which one value is coerced", "it stays as it is")
CHECK_PROCESSES                = _limit(2,             "processes",  "client",     "answers that are checked against schemas at a time", "further checks wait")
CHECK_SECONDS                  = _limit(5,             "seconds",    "response",   "processor time of one such check, which may take four times as long by the clock", "the answer is reported as unchecked")
CHECK_ERRORS                   = _limit(8,             "items",      "response",   "errors that are reported for an answer", "the rest is not listed")
NATIVE_ARGUMENTS_BYTES         = _limit(256 << 10,     "bytes",      "response",   "the arguments of a call on `/generate`", "an error instead of the call")
QUEUE                          = _limit(64,            "rows",       "client",     "answers of one client that wait for a place in a batch; a third more for all clients", "503 with Retry-After")
PROGRAMS                       = _limit(8,             "items",      "client",     "programs of this machine that take turns with each other without API keys, by user agent or `x-mlx-server-client`", "a new name takes the turns of the one that was used longest ago")
TIER_WAIT_SECONDS              = _limit(20,            "seconds",    "model",      "the time for which requests of a lower tier get no piece of a prompt, no token and no memory while those of higher tiers have work", "they get the next one", "server.tier_wait")
REMEMBERED_CLIENTS             = _limit(1024,         "items",      "model",      "clients without a waiting prompt whose share of prefill the engine remembers", "those with the smallest share are forgotten, and start level with the others")

_section("MCP servers")
MCP_SERVERS                    = _limit(16,            "items",      "request",    "MCP servers that a request names", "400")
MCP_RESPONSES                  = _limit(64,            "items",      "server",     "responses that use MCP servers at a time", "503")
MCP_PROCESSES                  = _limit(32,            "processes",  "server",     "MCP servers that run as child processes, each with a guard", "it waits, then 503")
MCP_SESSIONS                   = _limit(64,            "sockets",    "server",     "sessions with MCP servers over HTTP", "it waits, then 503")
MCP_WAIT_SECONDS               = _limit(10,            "seconds",    "request",    "how long a request waits while other requests use all processes or sessions", "503")
MCP_OPEN_SECONDS               = _limit(30,            "seconds",    "request",    "how long connecting to an MCP server and listing its tools may take", "the server has no tools in this response")
MCP_CALL_SECONDS               = _limit(30,            "seconds",    "request",    "how long a call of an MCP server's tool may take", "the call fails, and the model gets an error as its result")
MCP_TOOLS                      = _limit(256,           "items",      "request",    "tools of one MCP server", "the rest is left out of the list, with a note")
MCP_SCHEMA_BYTES               = _limit(256 << 10,     "bytes",      "request",    "names, descriptions and schemas of the tools of one MCP server", "the rest is left out of the list, with a note")
MCP_ALL_TOOLS                  = _limit(512,           "items",      "request",    "tools of all MCP servers of a request", "the rest is left out of the list, with a note")
MCP_ALL_SCHEMA_BYTES           = _limit(1 << 20,       "bytes",      "request",    "names, descriptions and schemas of all tools of MCP servers", "the rest is left out of the list, with a note")
MCP_CALLS                      = _limit(128,           "items",      "request",    "calls of MCP servers' tools, approved ones included", "further calls are ignored; 400 for more approvals")
MCP_PARALLEL_CALLS             = _limit(8,             "items",      "request",    "calls of MCP servers' tools that run at a time", "further calls wait")
MCP_ROUNDS                     = _limit(10,            "items",      "request",    "rounds of an answer in which tools are run", "a last round has no tools")
MCP_ROUND_SECONDS              = _limit(600,           "seconds",    "request",    "the time after which no further round of an answer has tools", "a last round has no tools")
MCP_RESULT_BYTES               = _limit(1 << 20,       "bytes",      "request",    "the result of a call, as the model gets it", "it is truncated, and says so")
MCP_ALL_RESULT_BYTES           = _limit(8 << 20,       "bytes",      "request",    "the results of all calls, as the model gets them", "they are truncated, and say so")
MCP_MESSAGE_BYTES              = _limit(8 << 20,       "bytes",      "connection", "a message from an MCP server", "the connection is closed")
MCP_MESSAGE_BRACKETS           = _limit(1 << 18,       "items",      "connection", "opening brackets in a message from an MCP server, and a quarter of its quotes and commas, because parsing millions of values would block other requests", "the connection is closed")
MCP_SESSION_BYTES              = _limit(64 << 20,      "bytes",      "connection", "all messages from an MCP server together", "the connection is closed")
TOOL_NAME_CHARACTERS           = _limit(128,           "characters", "request",    "the name of an MCP server's tool", "the tool is left out of the list, with a note")
MCP_MESSAGES                   = _limit(16_384,        "items",      "connection", "messages from an MCP server, each of which may ask for an answer", "the connection is closed")
MCP_OPENINGS                   = _limit(2,             "items",      "request",    "sessions that are opened with an MCP server for one request", "its further calls fail, and the model gets an error as their result")

_section("Models that are served elsewhere")
UPSTREAM_LINE_BYTES            = _limit(8 << 20,       "bytes",      "response",   "a line of an upstream's stream, or its answer as one body", "the answer ends with an error")
UPSTREAM_MEMORY                = _limit(512 << 20,     "bytes",      "response",   "memory for an upstream's answer, reckoned as four times the bytes that are received", "the answer ends with an error")
UPSTREAM_ALL_MEMORY            = _limit(2 << 30,       "bytes",      "server",     "the same memory for all upstreams' answers that run", "answers with more than an equal share end with an error")
UPSTREAM_HEADER_BYTES          = _limit(64 << 10,      "bytes",      "response",   "the headers of an upstream's or MCP server's response, with those of informational responses before it", "the connection is closed")
UPSTREAM_CHARACTERS            = _limit(4 << 20,       "characters", "response",   "the text, reasoning and calls of an upstream's answer", "the answer ends with an error")
UPSTREAM_EXTRA_BYTES           = _limit(1 << 20,       "bytes",      "response",   "what an upstream's answer has for its next request: its calls' `extra_content` and its `reasoning_details`", "the answer ends with an error")
UPSTREAM_CALLS                 = _limit(256,           "items",      "response",   "the calls of an upstream's answer, in fields of their own or in its text", "the answer ends with an error")
UPSTREAM_ERROR_BYTES           = _limit(64 << 10,      "bytes",      "response",   "the body of an upstream's error or token", "the rest is not read")
UPSTREAM_CONNECTIONS           = _limit(128,           "sockets",    "model",      "connections to one upstream", "it waits for a free one, then 503")
UPSTREAM_HOPS                  = _limit(4,             "items",      "request",    "servers of this kind that pass a request on, one to the next", "508 upstream_loop")
UPSTREAM_CONNECT_SECONDS       = _limit(10,            "seconds",    "request",    "how long connecting to an upstream may take", "it is tried again, then 504")
UPSTREAM_FIRST_SECONDS         = _limit(300,           "seconds",    "request",    "how long an upstream may take until its answer begins", "504", "models.*.upstream.first_seconds")
UPSTREAM_IDLE_SECONDS          = _limit(60,            "seconds",    "response",   "how long nothing may be added to an upstream's answer that has begun; less where `first_seconds` is", "the answer ends with an error")
UPSTREAM_ANSWER_SECONDS        = _limit(3600,         "seconds",    "response",   "how long an upstream's answer may take in all, also in the background", "the answer ends with an error")
UPSTREAM_RETRIES               = _limit(2,             "items",      "request",    "how often a request is sent again that an upstream refused or lost", "the next fallback, or 502 to 504", "models.*.upstream.retries")
UPSTREAM_PAUSE_SECONDS         = _limit(30,            "seconds",    "request",    "the pause that an upstream may ask for with Retry-After", "the request is not sent again")

_section("Responses in the background")
BACKGROUND_RESPONSES           = _limit(64,            "items",      "server",     "background responses", "503")
BACKGROUND_PER_CLIENT          = _limit(48,            "items",      "key",        "background responses of one key", "503")
STREAM_LOG_BYTES               = _limit(32 << 20,      "bytes",      "response",   "events of a background response, until it ends", "the response fails")
STREAM_LOGS_BYTES              = _limit(256 << 20,     "bytes",      "server",     "events of all background responses, until they end", "503 for a new response, and a running one fails")
RESUMABLE_STREAMS              = _limit(256,           "items",      "server",     "streams with `x-mlx-server-resumable` that run or ended within the last minute", "the oldest that has ended is forgotten; 503 if all run")
RESUMABLE_PER_CLIENT           = _limit(64,            "items",      "client",     "such streams of one key, or of one address", "the oldest that has ended is forgotten; 503 if all run")
RESUMABLE_SECONDS              = _limit(60,            "seconds",    "response",   "how long such a stream goes on, and is kept, without a connection that reads it", "its answer is cancelled, and it is forgotten")
RESUMABLE_BYTES                = _limit(64 << 20,      "bytes",      "server",     "events of all such streams", "those that have ended are forgotten, the oldest first; then a running one ends with an error")
UNSTORED_ENDS                  = _limit(256,           "items",      "server",     "responses that have ended and can't be stored yet", "503 for a new response that is to be stored")

_section("Stored responses and conversations")
STORE_BYTES                    = _limit(8_000_000_000, "bytes",      "server",     "stored bytes of all clients; those that share a key may have half of it", "507: nothing more is stored until something is deleted", "store.bytes")
STORED_PIECE_BYTES             = _limit(64 << 20,      "bytes",      "request",    "one stored item, one event, or one response without its output", "413")
STORE_CALLS                    = _limit(256,           "items",      "server",     "calls queued for the store's thread", "503")
STORE_CALL_BYTES               = _limit(128 << 20,     "bytes",      "server",     "bytes of the calls queued for the store's thread", "503")
CONVERSATION_ITEMS             = _limit(10_000,        "items",      "conversation", "items of a conversation", "400")
PAGE_BYTES                     = _limit(4 << 20,       "bytes",      "request",    "a page of items, or of events of a resumed stream; a larger item gets a page of its own", "the page is shorter, with `has_more`")
CHAIN_RESPONSES                = _limit(10_000,        "items",      "request",    "responses before `previous_response_id`", "400")
READ_BACK_ITEMS                = _limit(20_000,        "items",      "request",    "stored items to which `previous_response_id` or `conversation` refers", "413")
ITEM_REFERENCES                = _limit(1000,         "items",      "request",    "items referred to by id", "400")
STORED_RESPONSES               = _limit(10_000,        "items",      "server",     "stored responses, and as many conversations and chat completions", "the oldest is deleted")

_section("Files and batches")
FILE_BYTES                     = _limit(512_000_000,   "bytes",      "request",    "a file that is uploaded, and the answers of a batch", "413; the rest of the batch is not answered")
FILES_BYTES                    = _limit(32_000_000_000, "bytes",     "server",     "all files, of which those that share a key may have half", "507")
FILES                          = _limit(10_000,        "items",      "server",     "files, of which those that share a key may have half", "507")
FILE_NAME_CHARACTERS           = _limit(255,           "characters", "request",    "the name of a file", "it is truncated")
REQUEST_FILES                  = _limit(64,            "items",      "request",    "files that a request names by `file_id`", "400")
UPLOAD_PARTS                   = _limit(16,            "items",      "request",    "parts of a multipart body", "400")
UPLOAD_FIELD_BYTES             = _limit(4 << 10,       "bytes",      "request",    "what is no file in a multipart body", "400")
UPLOAD_BYTES                   = _limit(1 << 20,       "bytes",      "connection", "what may arrive of a file within the time for a request, and the time starts again", "the connection is closed")
UPLOADS                        = _limit(4,             "items",      "client",     "files that arrive at once", "503")
BATCH_LINES                    = _limit(50_000,        "items",      "request",    "requests of a batch", "the batch fails")
BATCH_LINE_BYTES               = _limit(4 << 20,       "bytes",      "request",    "a line of a batch, or of what an adapter learns", "the batch or the job fails")
BATCHES                        = _limit(64,            "items",      "server",     "batches that are under way, of which those that share a key may have half", "503")
BATCH_ERRORS                   = _limit(100,           "items",      "request",    "errors that a batch which has failed lists", "the rest is not listed")
TRAINING_JOBS                  = _limit(16,            "items",      "server",     "fine-tuning jobs that run or wait for their turn", "503")
TRAINING_TOKENS                = _limit(4_000_000,     "tokens",     "request",    "what a fine-tuning job learns in an epoch", "the job fails")
TRAINING_EVENTS                = _limit(500,           "items",      "request",    "events that a fine-tuning job keeps", "the oldest are dropped")
CUSTOM_ID_CHARACTERS           = _limit(512,           "characters", "request",    "`custom_id` of a request of a batch", "the batch fails")

_section("Models and adapters")
CHECKPOINT_HEADER_BYTES        = _limit(100_000_000,   "bytes",      "model",      "the header of one weights file, as in the safetensors library", "the model is unusable")
CHECKPOINT_FILES               = _limit(1000,         "items",      "model",      "weights files, counted in the folder or in the name of a shard", "the model is unusable")
SMALL_FILES_BYTES              = _limit(512 << 20,     "bytes",      "model",      "the files next to the weights that a download fetches and checks first", "the download ends")
HUB_LIST_BYTES                 = _limit(32 << 20,      "bytes",      "model",      "the hub's lists of a repository's files, all pages together", "the download ends")
HUB_PAUSE_SECONDS              = _limit(60,            "seconds",    "request",    "the pause that the hub may ask for with Retry-After or RateLimit", "the pause is a few seconds")
CHECKPOINT_LAYERS              = _limit(2048,         "items",      "model",      "layers and experts in a config", "the model is unusable")
NORMALIZER_GROWTH              = _limit(1000,         "items",      "model",      "the factor by which a tokenizer's normalizer may lengthen a text", "the model is unusable")
DECODER_GROWTH                 = _limit(16,           "items",      "model",      "the factor by which a tokenizer's decoder may lengthen a token", "the model is unusable")
TOKENIZER_BYTES                = _limit(64 << 20,      "bytes",      "model",      "`tokenizer.json`, or the file that it is converted from", "the model is unusable")
TOKENIZER_MEMORY               = _limit(2 << 30,       "bytes",      "model",      "memory of a process that reads or converts a tokenizer", "the model is unusable")
TOKENIZER_SECONDS              = _limit(120,           "seconds",    "model",      "how long such a process may take for one reply or a conversion", "503, and the process is killed")
DECODER_CHARACTERS             = _limit(1 << 16,       "characters", "model",      "the decoder of a tokenizer", "the model is unusable")
VOCABULARY_TOKENS              = _limit(1 << 24,       "tokens",     "model",      "the largest token id", "the model is unusable")
REASONING_DELIMITERS           = _limit(64,            "items",      "model",      "delimiters that end reasoning", "the request fails")
REASONING_DELIMITER_TOKENS     = _limit(256,           "tokens",     "model",      "a delimiter that ends reasoning", "the request fails")
CACHED_PROMPTS                 = _limit(512,           "items",      "model",      "prompts in the prompt cache of a model and adapter", "the least recently used is dropped")
PROMPT_SNAPSHOTS               = _limit(16,            "items",      "request",    "snapshots of a cached prompt's recurrent states and sliding windows", "the one whose neighbours are the nearest is dropped")
REQUEST_DEATHS                 = _limit(2,             "items",      "request",    "engine processes that a request ends in a row", "500, and no request that asks for the same is tried again")
MODEL_DEATHS                   = _limit(3,             "items",      "model",      "engine processes that end within a minute without a token of a model that they had requests for", "503 for the model for a minute")
FATAL_REQUESTS                 = _limit(64,            "items",      "model",      "requests that are refused because they have ended engines", "the oldest is tried again")
PROMPTS_AHEAD                  = _limit(16,            "items",      "server",     "next prompts of conversations to be computed ahead", "the oldest is dropped")
AHEAD_TOKENS                   = _limit(4096,         "tokens",     "conversation", "a conversation's next prompt computed ahead, or `compute_ahead`", "the rest is computed when it is sent")
PROMPT_FILE_BYTES              = _limit(20_000_000_000, "bytes",      "server",     "the prompt cache's files, as the disk counts them", "the least recently used are removed", "server.prompt_cache.disk")
PROMPT_WRITES_PER_DAY          = _limit(64_000_000_000, "bytes",      "server",     "what all servers of a data directory write to the prompt cache's files in a day, for the sake of the SSD", "no more is written until the next day", "server.prompt_cache.disk_writes_per_day")
PROMPT_FILES                   = _limit(65_536,        "items",      "server",     "files of the prompt cache", "the least recently used are removed")
PROMPT_WRITE_BYTES             = _limit(256 << 20,     "bytes",      "server",     "bytes of prompt caches that wait to be written, copied or after they left the memory limit; one larger file is allowed", "no more are copied until some are written; of what leaves, of which a 64th of MLX's memory limit is kept at most, only the beginning is kept")
ADAPTER_CONFIG_BYTES           = _limit(1_000_000,     "bytes",      "model",      "`adapter_config.json`", "the adapter is refused")
ADAPTER_HEADER_BYTES           = _limit(16_000_000,    "bytes",      "model",      "the header of an adapter's weights", "the adapter is refused")
ADAPTER_RANK                   = _limit(512,           "items",      "model",      "the rank of an adapter", "the adapter is refused")
LISTED_ADAPTERS                = _limit(4096,         "items",      "model",      "entries of the adapters' folder that are searched for the list of adapters", "the rest is not listed, but served by name")
ADDED_ADAPTERS                 = _limit(256,           "items",      "model",      "adapters that clients have loaded and not unloaded", "400 on the route that loads them")

_section("The page")
PAGE_STREAMS                   = _limit(8,             "items",      "client",     "open streams of the page's data", "503 for a further one")
LISTED_ANSWERS                 = _limit(200,           "items",      "server",     "ended requests that the page lists", "the oldest is dropped")
LISTED_TEXT                    = _limit(4000,         "characters", "request",    "text of a prompt or an answer that the page lists", "the rest is left out")
LISTED_CONVERSATIONS           = _limit(2000,         "items",      "client",     "conversations of the page that are listed, where the server stores them", "the last used are listed")
LISTED_TITLE                   = _limit(200,           "characters", "request",    "the title of a stored conversation of the page", "the rest is left out")
LISTED_LOG_LINES               = _limit(500,           "items",      "server",     "lines of the log that the page lists", "the oldest is dropped")
SAMPLES                        = _limit(1440,         "items",      "server",     "samples of 15 seconds for the page's charts, six hours of them", "the oldest is dropped")

_section("PDF files")
PDF_PAGES                      = _limit(2000,         "items",      "request",    "pages of a PDF file", "400")
PDF_CHARACTERS                 = _limit(16 << 20,      "characters", "request",    "the text of a PDF file", "400")
PDF_SECONDS                    = _limit(20,            "seconds",    "request",    "processor time of reading a PDF file, which may take four times as long by the clock", "400, or 503 on a machine too busy to give it that time, and the process is killed")
PDF_MEMORY                     = _limit(512 << 20,     "bytes",      "server",     "memory of a process that reads PDF files", "400, and the process is killed")
PDF_PROCESSES                  = _limit(2,             "processes",  "server",     "processes that read PDF files", "it waits for one")
CLIENT_PDF_PROCESSES           = _limit(1,             "processes",  "client",     "those of one client", "it waits for one")
IDLE_PDF_PROCESSES             = _limit(1,             "processes",  "server",     "idle processes that read PDF files", "it ends")

_section("Pictures")
PICTURES                       = _limit(20,            "items",      "request",    "pictures that a model is shown", "400; of older messages, the earliest are lines of text")
PICTURE_PIXELS                 = _limit(20_000_000,    "items",      "request",    "pixels of a picture's file", "400")
PICTURE_TOKENS                 = _limit(4096,         "tokens",     "request",    "the tokens of a picture whose size decides on them", "it is shown smaller")
LOW_DETAIL_TOKENS              = _limit(256,           "tokens",     "request",    "those of a picture that is sent with `detail: low`", "it is shown smaller")
PREFIX_TOKENS                  = _limit(1024,          "tokens",     "request",    "the tokens of a prompt besides its first picture's, if all see each other", "400")
PICTURE_SECONDS                = _limit(5,             "seconds",    "request",    "processor time of decoding a picture, which may take four times as long by the clock", "400, or 503 on a machine too busy to give it that time, and the process is killed")
PICTURE_URL_SECONDS            = _limit(15,            "seconds",    "request",    "how long fetching all pictures may take that a request names by URL", "400; of older messages, those that did not come are lines of text")
PICTURE_MEMORY                 = _limit(512 << 20,     "bytes",      "server",     "memory of a process that decodes pictures", "400, and the process is killed")
PICTURE_PROCESSES              = _limit(2,             "processes",  "server",     "processes that decode pictures", "it waits for one")
CLIENT_PICTURE_PROCESSES       = _limit(1,             "processes",  "client",     "those of one client", "it waits for one")
IDLE_PICTURE_PROCESSES         = _limit(1,             "processes",  "server",     "idle processes that decode pictures", "it ends")
PROCESSOR_SECONDS              = _limit(30,            "seconds",    "model",      "processor time of making mlx-vlm's processor of pictures, which may take four times as long by the clock", "the model is shown no pictures")
PROCESSOR_MEMORY               = _limit(2 << 30,       "bytes",      "server",     "memory of the process that runs such processors", "400, and the process is killed")
PROCESSED_BYTES                = _limit(256 << 20,     "bytes",      "request",    "what such a processor makes of a picture", "400, and the process is killed")
PIXEL_BYTES                    = _limit(768 << 20,     "bytes",      "client",     "pixels in a client's requests that run or wait; a third more for all", "503 with Retry-After")
DECODED_PICTURE_BYTES          = _limit(128 << 20,     "bytes",      "server",     "decoded pictures that are kept for a conversation's next turn", "the least recently used is dropped")
TOWER_BYTES                    = _limit(4 << 30,       "bytes",      "model",      "what a tower takes to compute its largest picture", "pictures are shown smaller")
PICTURE_FEATURE_BYTES          = _limit(256 << 20,     "bytes",      "model",      "what a model's tower has computed of pictures", "the least recently used is dropped")

_section("Errors and logs")
ERROR_CHARACTERS               = _limit(1000,          "characters", "request",    "the message of an error, a chat template's included", "it is truncated")
QUOTED_ERROR_CHARACTERS        = _limit(500,           "characters", "request",    "the grammar compiler's or an MCP server's message in an error", "it is truncated")
FIELD_ERROR_CHARACTERS         = _limit(300,           "characters", "request",    "the message about an invalid field of a request, or about one error of an answer", "it is truncated")
WRONG_FIELD_CHARACTERS         = _limit(200,           "characters", "request",    "`param`, the path of an invalid field", "it is truncated")
LOGGED_PATH_PARTS              = _limit(12,            "items",      "request",    "segments of a path in the log", "the rest is logged as one")
LOG_FILE_BYTES                 = _limit(10 << 20,      "bytes",      "server",     "a log file", "a new one is started")
LOG_FILES                      = _limit(4,             "items",      "server",     "older log files", "the oldest is deleted")

_section("The server of a test run")
RECORDED_REQUEST_BYTES         = _limit(64 << 20,      "bytes",      "server",     "the bodies of requests that the server of a test run keeps for the test", "the oldest are dropped")
UNANSWERED_REQUESTS            = _limit(100,           "items",      "server",     "requests without an answer that the server of a test run names", "further ones are not named")

# fmt: on

FOUND = (
    ("open connections", "at most half of the descriptors that the system grants", "server"),
    ("open WebSockets", "at most a quarter of these descriptors", "server"),
    ("weights and caches", "`server.memory_budget`, or a default for the machine", "server"),
    ("the prompt cache", "the rest of the memory budget", "server"),
    ("tokens of a request and its answer", "the model's context, or `context_length`", "request"),
    ("an answer's events", "as many as its tokens allow", "response"),
    ("labels of metrics", "the models in models.yaml", "server"),
)
"""Limits whose values depend on the machine, the model or the settings."""

SIZES = ((10**9, "GB"), (10**6, "MB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def markdown() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Limits\n"
    yield "All that a client, a model or another server can make grow. A name in brackets is the"
    yield "setting in models.yaml. `python -m mlx_server.limits` prints this page.\n"
    yield "| What | At most | Beyond it |"
    yield "|---|---|---|"
    for title, rows in SECTIONS.items():
        yield f"| **{title}** | | |"
        for row in rows:
            setting = f" (`{row.setting}`)" if row.setting else ""
            yield f"| {row.bounds} | {_quantity(row)} a {row.per}{setting} | {row.beyond} |"
    yield "| **Found when the server runs** | | |"
    for bounds, most, per in FOUND:
        yield f"| {bounds} | {most}, for each {per} | |"


def _quantity(limit: Limit) -> str:
    """The value with its unit, as in `64 KiB`, `8 GB` or `10,000`."""
    if limit.unit == "bytes":
        for size, unit in SIZES:
            if limit.value % size == 0:
                return f"{limit.value // size:,} {unit}"
    unit = "" if limit.unit in ("items", "sockets") else f" {limit.unit}"
    return f"{limit.value:,}{unit}"


if __name__ == "__main__":
    print(markdown(), end="")  # noqa: T201
