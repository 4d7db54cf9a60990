"""Limits on the schemas and grammars that answers follow."""

from mlx_server.limits.limit import Limit

# Schemas that answers follow

SCHEMA_BYTES = Limit("a JSON schema", 256 << 10, "bytes", "request", beyond="400")
SCHEMA_DEPTH = Limit("nested schemas", 48, "items", "request", beyond="400")
SCHEMA_NODES = Limit("objects and arrays in a schema", 20_000, "items", "request", beyond="400")
SCHEMA_PROPERTIES = Limit(
    "names in one `properties` or `required`", 500, "items", "request", beyond="400"
)
SCHEMA_VALUES = Limit("values of one `enum`", 10_000, "items", "request", beyond="400")
SCHEMA_COUNT = Limit(
    bounds="`minItems`, `maxItems` and other counts except `maxLength`",
    value=10_000,
    unit="items",
    per="request",
    beyond="400",
)
SCHEMA_TEXT_LENGTH = Limit(
    bounds="`maxLength`, because the compiler counts in 32 bits",
    value=2**31,
    unit="characters",
    per="request",
    beyond="400",
)
SCHEMA_MULTIPLES = Limit(
    "the digits of `multipleOf`, read as a whole number", 10_000, "items", "request", beyond="400"
)
SCHEMA_JOINED_PATTERNS = Limit(
    bounds="patterns that one text has to match at once",
    value=8,
    unit="items",
    per="request",
    beyond=(
        "if the schema is strict, 400; otherwise such patterns are not enforced, and the "
        "answer says so"
    ),
)
SCHEMA_CHOICES = Limit(
    bounds="alternatives in a schema, counted through its references",
    value=10_000,
    unit="items",
    per="request",
    beyond="if the schema is strict, 400; otherwise they are not enforced, and the answer says so",
)
SCHEMA_DISJOINT_DEPTH = Limit(
    bounds="levels of two schemas that are compared to see whether they are disjoint",
    value=8,
    unit="items",
    per="request",
    beyond="they count as not disjoint",
)
SCHEMA_COMPARISONS = Limit(
    bounds="schemas, values and names in such comparisons of all `oneOf` of a schema",
    value=20_000,
    unit="items",
    per="request",
    beyond="the options of further `oneOf` count as not disjoint",
)
SCHEMA_VARIANTS = Limit(
    bounds="variants of one object's schema that a grammar distinguishes",
    value=32,
    unit="items",
    per="request",
    beyond="fewer variants are distinguished",
)
SCHEMA_VARIANT_MEMBERS = Limit(
    bounds="members in all these variants together",
    value=600,
    unit="items",
    per="request",
    beyond="fewer variants are distinguished",
)
PATTERN_CHARACTERS = Limit(
    "a regular expression in a schema or grammar", 2_000, "characters", "request", beyond="400"
)
PATTERN_REPEATS = Limit(
    "a count of repetitions in a regular expression", 10_000, "items", "request", beyond="400"
)
PATTERN_STATES = Limit(
    bounds="a regular expression with its repetitions written out",
    value=50_000,
    unit="characters",
    per="request",
    beyond="400",
)
PATTERN_DEPTH = Limit("nested groups in a regular expression", 60, "items", "request", beyond="400")

COMPILED_SCHEMAS = Limit(
    bounds="compiled or refused schemas in the cache",
    value=128,
    unit="items",
    per="server",
    beyond="the least recently used is dropped",
)
SCHEMA_PROCESSES = Limit(
    bounds="processes that compile schemas and check answers",
    value=6,
    unit="processes",
    per="server",
    beyond="it waits for one",
)
CLIENT_SCHEMA_PROCESSES = Limit(
    "those of one client", 2, "processes", "client", beyond="it waits for one"
)
IDLE_SCHEMA_PROCESSES = Limit(
    "idle processes that compile schemas", 1, "processes", "server", beyond="it ends"
)
SCHEMA_SECONDS = Limit(
    bounds="processor time to compile a schema, which may take four times as long by the clock",
    value=2,
    unit="seconds",
    per="request",
    beyond="503, as what else the machine does counts too, and the process is killed",
)
SCHEMA_MEMORY = Limit(
    bounds="memory of a process that compiles schemas",
    value=256 << 20,
    unit="bytes",
    per="server",
    beyond="400, and the process is killed",
)

# Other grammars that answers follow

CHOICES = Limit("options of `choice`", 10_000, "items", "request", beyond="400")
CHOICE_CHARACTERS = Limit(
    "all options of `choice` together", 256 << 10, "characters", "request", beyond="400"
)
GRAMMAR_CHARACTERS = Limit(
    "a grammar that a client writes", 128 << 10, "characters", "request", beyond="400"
)
GRAMMAR_RULES = Limit(
    "rules of a grammar that a client writes", 500, "items", "request", beyond="400"
)
GRAMMAR_INTERSECTIONS = Limit(
    bounds="intersections (`&`) in a grammar, each of which may double the work",
    value=8,
    unit="items",
    per="request",
    beyond="400",
)
GRAMMAR_DEPTH = Limit("nested brackets in a grammar", 48, "items", "request", beyond="400")

# Compiling grammars

WHOLE_GRAMMAR_CHARACTERS = Limit(
    "the grammar of an answer, with all its tools", 4 << 20, "characters", "request", beyond="400"
)
WHOLE_GRAMMAR_RULES = Limit(
    bounds="rules of the grammar of an answer, as many as fit the compiler's stack",
    value=4096,
    unit="items",
    per="request",
    beyond="400",
)
COMPILE_SECONDS = Limit("the time to compile a grammar", 5, "seconds", "request", beyond="503")
COMPILE_THREADS = Limit(
    bounds=(
        "grammars that are compiled at a time, without those that take more than half a second; "
        "and as many of those of a client"
    ),
    value=2,
    unit="threads",
    per="client",
    beyond="the client's further grammars wait; 503 while its slow ones are past their time",
)
SLOW_COMPILE_THREADS = Limit(
    bounds="grammars that are compiled at a time, the slow ones of all clients included",
    value=8,
    unit="threads",
    per="server",
    beyond="further grammars wait; 503 while all of these are past their time",
)
COMPILE_STACK_BYTES = Limit(
    bounds="the stack of a thread that compiles grammars",
    value=256 << 20,
    unit="bytes",
    per="server",
    beyond="not reached: WHOLE_GRAMMAR_RULES applies first",
)
COMPILED_GRAMMARS = Limit(
    bounds="compiled or refused grammars in the cache",
    value=64,
    unit="items",
    per="server",
    beyond="the least recently used is dropped",
)
GRAMMAR_ITEMS_IN_ROW = Limit(
    bounds="items in a row of the grammar's parser",
    value=4_000,
    unit="items",
    per="request",
    beyond="the row fails; others go on",
)
GRAMMAR_FIRST_STEPS = Limit(
    bounds="steps of the grammar's lexer before the first token",
    value=1_000_000,
    unit="items",
    per="request",
    beyond="400",
)
GRAMMAR_STEPS = Limit(
    bounds="steps of the grammar's lexer for each token",
    value=200_000,
    unit="items",
    per="request",
    beyond="the row fails; others go on",
)
GRAMMAR_STEP_ITEMS = Limit(
    bounds="items of the grammar's parser for each token",
    value=200_000,
    unit="items",
    per="request",
    beyond="the row fails; others go on",
)
GRAMMAR_TOKEN_SECONDS = Limit(
    bounds="the time to compute which tokens a grammar allows next, in a thread of its own",
    value=10,
    unit="seconds",
    per="request",
    beyond="the row fails; others go on",
)
MASK_THREADS = Limit(
    bounds="threads that compute this for slow grammars, one for each client at a time",
    value=2,
    unit="threads",
    per="server",
    beyond="further rows with slow grammars wait; others go on",
)
GRAMMAR_STATES = Limit(
    bounds="states of the grammar's lexer",
    value=100_000,
    unit="items",
    per="request",
    beyond="the row fails; others go on",
)
GRAMMAR_SIZE = Limit("symbols of a compiled grammar", 200_000, "items", "request", beyond="400")
GRAMMAR_ERROR_CHARACTERS = Limit(
    bounds="the compiler's message about a grammar that it refuses",
    value=500,
    unit="characters",
    per="request",
    beyond="it is truncated",
)
