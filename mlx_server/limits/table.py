"""The table of all limits in SECURITY.md."""

from collections.abc import Iterator

from mlx_server.limits import (
    answers,
    background,
    checkpoints,
    connections,
    grammars,
    logs,
    mcp,
    page,
    pdf,
    requests,
    store,
    templates,
    testing,
    upstream,
    web_sockets,
)
from mlx_server.limits.limit import Limit

AREAS = (
    ("Connections", connections),
    ("WebSockets", web_sockets),
    ("Requests", requests),
    ("Chat templates", templates),
    ("Schemas and grammars", grammars),
    ("Answers", answers),
    ("MCP servers", mcp),
    ("Models that are served elsewhere", upstream),
    ("Responses in the background", background),
    ("Stored responses and conversations", store),
    ("Models and adapters", checkpoints),
    ("The page", page),
    ("PDF files", pdf),
    ("Errors and logs", logs),
    ("The server of a test run", testing),
)
"""The sections of the table, in the order in which a request comes to them."""

DERIVED = (
    ("open connections", "at most half of the descriptors that the system grants", "server"),
    ("open WebSockets", "at most a quarter of these descriptors", "server"),
    ("weights and caches", "`server.memory_budget`, or a default for the machine", "server"),
    ("the prompt cache", "the rest of the memory budget", "server"),
    ("tokens of a request and its answer", "the model's context, or `context_length`", "request"),
    ("an answer's events", "as many as ANSWER_TOKENS or `max_tokens` allow", "response"),
    ("labels of metrics", "the models in models.yaml", "server"),
)
"""The cells `What`, `At most` and `For each` of limits whose values depend on the machine, the
model or the settings."""

SIZES = ((10**9, "GB"), (10**6, "MB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def named() -> dict[str, Limit]:
    """Every limit, in the table's order."""
    return {
        name: limit
        for _, area in AREAS
        for name, limit in vars(area).items()
        if isinstance(limit, Limit)
    }


def markdown() -> str:
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "| What | At most | For each | Beyond it | Setting |"
    yield "|---|---|---|---|---|"
    for title, area in AREAS:
        yield f"| **{title}** | | | | |"
        for limit in vars(area).values():
            if isinstance(limit, Limit):
                setting = f"`{limit.setting}`" if limit.setting else ""
                yield _row(limit.bounds, quantity(limit), limit.per, limit.beyond, setting)
    yield "| **Found when the server runs** | | | | |"
    for bounds, most, per in DERIVED:
        yield _row(bounds, most, per, "", "")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def quantity(limit: Limit) -> str:
    """The value with its unit, as in `64 KiB`, `8 GB` or `10,000`."""
    value = limit.value
    if limit.unit == "bytes":
        for size, unit in SIZES:
            if value % size == 0:
                return f"{value // size:,} {unit}"
    if limit.unit in ("items", "sockets"):
        return f"{value:,}"
    return f"{value:,} {limit.unit}"
