"""Answers, and what is made of them."""

from mlx_server.limits.limit import Limit

# Answers

CONCURRENCY = Limit(
    bounds="rows that are decoded together",
    value=16,
    unit="rows",
    per="server",
    beyond="further ones wait in the queue",
    setting="server.concurrency",
)
WAIT_SECONDS = Limit(
    bounds="how long a request waits for memory that others use",
    value=300,
    unit="seconds",
    per="request",
    beyond="503 with Retry-After",
    setting="server.wait_seconds",
)
ANSWER_TOKENS = Limit(
    bounds="an answer to which nobody set a limit",
    value=16_384,
    unit="tokens",
    per="request",
    beyond="it ends with `length`",
)
CORRECTION_TOKENS = Limit(
    bounds="what a model is told of what was wrong with its answer",
    value=1024,
    unit="tokens",
    per="request",
    beyond="it is not asked again",
)
UNREAD_BYTES = Limit(
    bounds="tokens of an answer that its client is too slow to read",
    value=128 << 10,
    unit="bytes",
    per="request",
    beyond="its rows pause until they are read",
)

# What models write

CALL_DEPTH = Limit(
    bounds="values within each other in the arguments of a call",
    value=64,
    unit="items",
    per="response",
    beyond="the text is no call",
)
TEXT_SCHEMA_DEPTH = Limit(
    bounds="schemas within each other that describe one argument written as text",
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
    beyond="further ones are described as anything",
)
HARMONY_DEPTH = Limit(
    bounds="levels of a schema in such a description",
    value=32,
    unit="items",
    per="request",
    beyond="deeper ones are described as anything",
)
HARMONY_HEADER_TOKENS = Limit(
    bounds="a header of a Harmony message",
    value=128,
    unit="tokens",
    per="response",
    beyond="it counts as text",
)
STRAY_MARKS = Limit(
    bounds="marks without a meaning between two calls, where a grammar is followed",
    value=2,
    unit="items",
    per="response",
    beyond="the grammar allows no more",
)
KNOWN_MARKS = Limit(
    bounds="sets of marks for which the parsers keep a pattern, at each of two places",
    value=1024,
    unit="items",
    per="server",
    beyond="the longest unused is forgotten",
)

# Repair

READ_JSON_CHARACTERS = Limit(
    bounds="JSON in an answer that is read at all",
    value=4 << 20,
    unit="characters",
    per="response",
    beyond="it stays as the model wrote it",
)
MENDED_JSON_CHARACTERS = Limit(
    bounds="JSON in which slips are looked for",
    value=256 << 10,
    unit="characters",
    per="response",
    beyond="it stays as the model wrote it",
)
MENDED_JSON_LOOKS = Limit(
    bounds="the characters of such JSON, times the places where a value may end",
    value=50_000_000,
    unit="items",
    per="response",
    beyond="it stays as the model wrote it",
)
COERCED_DEPTH = Limit(
    bounds="levels of a schema by which values are coerced: `$ref` can make it endless",
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
    per="server",
    beyond="they wait for each other",
)
CHECK_SECONDS = Limit(
    bounds="processor time of one such check; it may take four times as long by the clock",
    value=5,
    unit="seconds",
    per="response",
    beyond="the answer is told to be unchecked",
)
CHECK_ERRORS = Limit(
    bounds="what is told to be wrong with an answer",
    value=8,
    unit="items",
    per="response",
    beyond="the rest goes unmentioned",
)
CHECK_ERROR_CHARACTERS = Limit(
    bounds="one of these",
    value=300,
    unit="characters",
    per="response",
    beyond="it is cut",
)
NATIVE_ARGUMENTS_BYTES = Limit(
    bounds="the arguments of a call on `/generate`",
    value=256 << 10,
    unit="bytes",
    per="response",
    beyond="an error in place of the call",
)
QUEUE = Limit(
    bounds="answers of one client that wait for a place in the batch; of all clients, a third more",
    value=64,
    unit="rows",
    per="client",
    beyond="503 with Retry-After",
    setting="server.queue",
)
REMEMBERED_CLIENTS = Limit(
    bounds="clients without a waiting prompt of which the engine knows what they had computed",
    value=1024,
    unit="items",
    per="model",
    beyond="those that had least are forgotten, and start level with the others",
)
