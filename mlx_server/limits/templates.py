"""Limits on chat templates."""

from mlx_server.limits.limit import Limit

COMPILED_TEMPLATES = Limit(
    bounds="compiled chat templates that a process keeps",
    value=32,
    unit="items",
    per="server",
    beyond="the least recently used is dropped",
)
TEMPLATE_ERROR_CHARACTERS = Limit(
    bounds="the message of a chat template that refuses a conversation",
    value=1000,
    unit="characters",
    per="request",
    beyond="it is truncated",
)

TEMPLATE_PROCESSES = Limit(
    "processes that render chat templates", 8, "processes", "server", beyond="it waits for one"
)
IDLE_TEMPLATE_PROCESSES = Limit(
    "idle processes that render chat templates", 2, "processes", "server", beyond="it ends"
)
TEMPLATE_SECONDS = Limit(
    bounds="processor time of one rendering, which may take four times as long by the clock",
    value=2,
    unit="seconds",
    per="request",
    beyond="400, or 503 on a machine too busy to give it that time, and the process is killed",
)
TEMPLATE_MEMORY = Limit(
    bounds="memory of a process that renders chat templates",
    value=512 << 20,
    unit="bytes",
    per="server",
    beyond="400, and the process is killed",
)
TEMPLATE_CHARACTERS = Limit(
    "the prompt that a chat template renders", 32 << 20, "characters", "request", beyond="400"
)
TEMPLATE_SOURCE = Limit(
    "the source of a chat template", 1 << 20, "characters", "model", beyond="500 model_unusable"
)
SCHEMA_PROMPT_TOKENS = Limit(
    bounds="the schema of an answer in its prompt, and at most an eighth of the context",
    value=2048,
    unit="tokens",
    per="request",
    beyond="the prompt does not describe it, and `x-mlx-server-ignored` has `schema_in_prompt`",
)
