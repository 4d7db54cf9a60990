"""Schemas and grammars that answers follow."""

from mlx_server.limits.limit import Limit

# Schemas that answers follow

SCHEMA_BYTES = Limit(
    bounds="a JSON schema",
    value=256 << 10,
    unit="bytes",
    per="request",
    beyond="400",
)
SCHEMA_DEPTH = Limit(
    bounds="schemas within each other",
    value=48,
    unit="items",
    per="request",
    beyond="400",
)
SCHEMA_NODES = Limit(
    bounds="objects and arrays in a schema",
    value=20_000,
    unit="items",
    per="request",
    beyond="400",
)
SCHEMA_PROPERTIES = Limit(
    bounds="names in one `properties` or `required`",
    value=500,
    unit="items",
    per="request",
    beyond="400",
)
SCHEMA_VALUES = Limit(
    bounds="values of one `enum`",
    value=10_000,
    unit="items",
    per="request",
    beyond="400",
)
SCHEMA_COUNT = Limit(
    bounds="`minItems`, `maxItems` and what else counts, but for `maxLength`",
    value=10_000,
    unit="items",
    per="request",
    beyond="400",
)
SCHEMA_TEXT_LENGTH = Limit(
    bounds="`maxLength`, since the compiler counts in 32 bits",
    value=2**31,
    unit="characters",
    per="request",
    beyond="400",
)
SCHEMA_MULTIPLES = Limit(
    bounds="what the digits of `multipleOf` come to",
    value=10_000,
    unit="items",
    per="request",
    beyond="400",
)
SCHEMA_JOINED_PATTERNS = Limit(
    bounds="patterns that one text has to match together",
    value=8,
    unit="items",
    per="request",
    beyond=(
        "if the schema is strict, 400; otherwise such patterns are not enforced, and the "
        "answer says so"
    ),
)
SCHEMA_CHOICES = Limit(
    bounds="choices that a schema makes, counted through its references",
    value=10_000,
    unit="items",
    per="request",
    beyond="if the schema is strict, 400; otherwise they are not enforced, and the answer says so",
)
SCHEMA_APART_DEPTH = Limit(
    bounds="levels at which two schemas are compared",
    value=8,
    unit="items",
    per="request",
    beyond="they count as not different",
)
SCHEMA_COMPARISONS = Limit(
    bounds="comparisons of schemas",
    value=20_000,
    unit="items",
    per="request",
    beyond="no further two count as different",
)
SCHEMA_WAYS = Limit(
    bounds="orders of the members of one object that a grammar allows",
    value=32,
    unit="items",
    per="request",
    beyond="fewer orders are allowed",
)
SCHEMA_WAYS_MEMBERS = Limit(
    bounds="members of all these orders together",
    value=600,
    unit="items",
    per="request",
    beyond="fewer orders are allowed",
)
PATTERN_CHARACTERS = Limit(
    bounds="a regular expression in a schema or grammar",
    value=2_000,
    unit="characters",
    per="request",
    beyond="400",
)
PATTERN_REPEATS = Limit(
    bounds="a count of repetitions in a regular expression",
    value=10_000,
    unit="items",
    per="request",
    beyond="400",
)
PATTERN_STATES = Limit(
    bounds="a regular expression with its repetitions written out",
    value=50_000,
    unit="characters",
    per="request",
    beyond="400",
)
PATTERN_DEPTH = Limit(
    bounds="groups within each other in a regular expression",
    value=60,
    unit="items",
    per="request",
    beyond="400",
)

COMPILED_SCHEMAS = Limit(
    bounds="compiled schemas that are kept, and refusals",
    value=128,
    unit="items",
    per="server",
    beyond="the longest unused is forgotten",
)
SCHEMA_PROCESSES = Limit(
    bounds="processes that compile schemas and check answers: more than check at a time",
    value=4,
    unit="processes",
    per="server",
    beyond="waits for one",
)
IDLE_SCHEMA_PROCESSES = Limit(
    bounds="such processes that have nothing to do",
    value=1,
    unit="processes",
    per="server",
    beyond="ends",
)
SCHEMA_SECONDS = Limit(
    bounds="processor time to compile a schema; it may take four times as long by the clock",
    value=2,
    unit="seconds",
    per="request",
    beyond="400, and the process is killed",
)
SCHEMA_MEMORY = Limit(
    bounds="memory of such a process",
    value=256 << 20,
    unit="bytes",
    per="server",
    beyond="400, and the process is killed",
)

# Other grammars that answers follow

CHOICES = Limit(
    bounds="options of `choice`",
    value=10_000,
    unit="items",
    per="request",
    beyond="400",
)
CHOICE_CHARACTERS = Limit(
    bounds="the options of `choice` together",
    value=256 << 10,
    unit="characters",
    per="request",
    beyond="400",
)
GRAMMAR_CHARACTERS = Limit(
    bounds="a grammar, as a client writes it",
    value=128 << 10,
    unit="characters",
    per="request",
    beyond="400",
)
GRAMMAR_RULES = Limit(
    bounds="rules of a grammar that a client writes",
    value=500,
    unit="items",
    per="request",
    beyond="400",
)
GRAMMAR_INTERSECTIONS = Limit(
    bounds="intersections (`&`) in a grammar: each may double the work",
    value=8,
    unit="items",
    per="request",
    beyond="400",
)
GRAMMAR_DEPTH = Limit(
    bounds="brackets within each other in a grammar",
    value=48,
    unit="items",
    per="request",
    beyond="400",
)

# Compiling grammars

WHOLE_GRAMMAR_CHARACTERS = Limit(
    bounds="the grammar of an answer, with all its tools",
    value=4 << 20,
    unit="characters",
    per="request",
    beyond="400",
)
WHOLE_GRAMMAR_RULES = Limit(
    bounds="rules of such a grammar: then they fit the compiler's stack",
    value=4096,
    unit="items",
    per="request",
    beyond="400",
)
COMPILE_SECONDS = Limit(
    bounds="the time to compile a grammar",
    value=5,
    unit="seconds",
    per="request",
    beyond="400",
)
COMPILE_THREADS = Limit(
    bounds="grammars that are compiled at a time",
    value=2,
    unit="threads",
    per="server",
    beyond="they wait for each other",
)
COMPILE_STACK_BYTES = Limit(
    bounds="the stack of a thread that compiles",
    value=256 << 20,
    unit="bytes",
    per="server",
    beyond="nothing: WHOLE_GRAMMAR_RULES is met first",
)
COMPILED_GRAMMARS = Limit(
    bounds="compiled grammars that are kept, and refusals",
    value=64,
    unit="items",
    per="server",
    beyond="the longest unused is forgotten",
)
GRAMMAR_ITEMS_IN_ROW = Limit(
    bounds="items of a row of the parser",
    value=4_000,
    unit="items",
    per="request",
    beyond="the row fails, and others go on",
)
GRAMMAR_FIRST_STEPS = Limit(
    bounds="steps of the lexer before the first token",
    value=1_000_000,
    unit="items",
    per="request",
    beyond="400",
)
GRAMMAR_STEPS = Limit(
    bounds="steps of the lexer a token",
    value=200_000,
    unit="items",
    per="request",
    beyond="the row fails, and others go on",
)
GRAMMAR_STEP_ITEMS = Limit(
    bounds="items of the parser a token",
    value=200_000,
    unit="items",
    per="request",
    beyond="the row fails, and others go on",
)
GRAMMAR_STATES = Limit(
    bounds="states of the lexer",
    value=100_000,
    unit="items",
    per="request",
    beyond="the row fails, and others go on",
)
GRAMMAR_SIZE = Limit(
    bounds="symbols of a compiled grammar",
    value=200_000,
    unit="items",
    per="request",
    beyond="400",
)
GRAMMAR_ERROR_CHARACTERS = Limit(
    bounds="what the compiler says of a grammar that it refuses",
    value=500,
    unit="characters",
    per="request",
    beyond="it is cut",
)
