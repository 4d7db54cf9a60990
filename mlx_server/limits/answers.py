"""Limits on answers, and on checking and repairing them."""

from mlx_server.limits.limit import Limit

# Answers

CONCURRENCY = Limit(
    bounds="rows in one batch",
    value=16,
    unit="rows",
    per="server",
    beyond="further rows wait in the queue",
    setting="server.concurrency",
)
WAIT_SECONDS = Limit(
    bounds="how long a request waits for memory that other requests use",
    value=300,
    unit="seconds",
    per="request",
    beyond="503 with Retry-After",
    setting="server.wait_seconds",
)
ANSWER_TOKENS = Limit(
    bounds="an answer for which neither the request nor models.yaml sets a limit",
    value=16_384,
    unit="tokens",
    per="request",
    beyond="it ends with the finish reason `length`",
)
CORRECTION_TOKENS = Limit(
    bounds="the message that lists the errors of an answer when it is generated again",
    value=1024,
    unit="tokens",
    per="request",
    beyond="it is not generated again",
)
UNREAD_BYTES = Limit(
    bounds="tokens of an answer that its client has not read yet",
    value=128 << 10,
    unit="bytes",
    per="request",
    beyond="its rows pause until they are read",
)

# What models write

CALL_DEPTH = Limit(
    bounds="nested values in the arguments of a tool call",
    value=64,
    unit="items",
    per="response",
    beyond="the text is not read as a call",
)
TEXT_SCHEMA_DEPTH = Limit(
    bounds="nested schemas that describe one argument written as text",
    value=64,
    unit="items",
    per="response",
    beyond="deeper ones may be any text",
)
HARMONY_REFERENCES = Limit(
    bounds="references followed to describe one tool in a Harmony prompt",
    value=32,
    unit="items",
    per="request",
    beyond="further ones are described as `any`",
)
HARMONY_DEPTH = Limit(
    bounds="levels of a schema in a tool's description in a Harmony prompt",
    value=32,
    unit="items",
    per="request",
    beyond="deeper ones are described as `any`",
)
HARMONY_PARAMETERS = Limit(
    bounds="the parameters of one tool in a Harmony prompt, with what they refer to",
    value=1 << 18,
    unit="characters",
    per="request",
    beyond="400",
)
HARMONY_HEADER_TOKENS = Limit(
    "the header of a Harmony message", 128, "tokens", "response", beyond="it counts as text"
)
STRAY_DELIMITERS = Limit(
    bounds="stray delimiters between two calls of an answer that follows a grammar",
    value=2,
    unit="items",
    per="response",
    beyond="the grammar allows no more",
)
CACHED_DELIMITER_SETS = Limit(
    bounds="sets of delimiters for which the parsers cache a pattern, in each of two caches",
    value=1024,
    unit="items",
    per="server",
    beyond="the least recently used is dropped",
)

# Repair

READ_JSON_CHARACTERS = Limit(
    bounds="JSON in an answer that is parsed at all",
    value=4 << 20,
    unit="characters",
    per="response",
    beyond="it stays as the model wrote it",
)
REPAIRED_JSON_CHARACTERS = Limit(
    bounds="JSON in which syntax errors are repaired",
    value=256 << 10,
    unit="characters",
    per="response",
    beyond="it stays as the model wrote it",
)
REPAIRED_JSON_STEPS = Limit(
    bounds="the characters of JSON to be repaired, times the places where a value may end",
    value=50_000_000,
    unit="items",
    per="response",
    beyond="it stays as the model wrote it",
)
COERCED_DEPTH = Limit(
    bounds="levels of a schema by which values are coerced (`$ref` can make them endless)",
    value=16,
    unit="items",
    per="response",
    beyond="deeper values stay as they are",
)
COERCED_PARTS = Limit(
    bounds="parts of a schema by which one value is coerced",
    value=256,
    unit="items",
    per="response",
    beyond="it stays as it is",
)
CHECK_PROCESSES = Limit(
    bounds="answers that are checked against schemas at a time",
    value=2,
    unit="processes",
    per="client",
    beyond="further checks wait",
)
CHECK_SECONDS = Limit(
    bounds="processor time of one such check, which may take four times as long by the clock",
    value=5,
    unit="seconds",
    per="response",
    beyond="the answer is reported as unchecked",
)
CHECK_ERRORS = Limit(
    bounds="errors that are reported for an answer",
    value=8,
    unit="items",
    per="response",
    beyond="the rest is not listed",
)
CHECK_ERROR_CHARACTERS = Limit(
    "the message of one such error", 300, "characters", "response", beyond="it is truncated"
)
NATIVE_ARGUMENTS_BYTES = Limit(
    bounds="the arguments of a call on `/generate`",
    value=256 << 10,
    unit="bytes",
    per="response",
    beyond="an error instead of the call",
)
QUEUE = Limit(
    bounds="answers of one client that wait for a place in a batch; a third more for all clients",
    value=64,
    unit="rows",
    per="client",
    beyond="503 with Retry-After",
    setting="server.queue",
)
REMEMBERED_CLIENTS = Limit(
    bounds="clients without a waiting prompt whose share of prefill the engine remembers",
    value=1024,
    unit="items",
    per="model",
    beyond="those with the smallest share are forgotten, and start level with the others",
)
