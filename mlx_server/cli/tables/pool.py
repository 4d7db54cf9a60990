"""`mlx-server models`: the models of a running server, as a table."""

import time
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import httpx
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlx_server.cli.tables.printable import printable
from mlx_server.clients.chat import parsed_json
from mlx_server.errors import ServerError

COLUMNS = ("id", "family", "source", "state", "leases", "memory", "last used")

PIPE_WIDTH = 10_000
"""Width of tables in a pipe, in characters: wide enough that no line is cut."""


class ProgressBody(TypedDict):
    done: int
    total: Annotated[int, msgspec.Meta(gt=0)]


class PrefillBody(TypedDict):
    prompt_tokens: int
    computed_tokens: int


class ModelBody(TypedDict):
    id: str
    family: str | None
    source: str
    state: str
    leases: int
    bytes: int
    last_used: float | None
    progress: ProgressBody | None
    prefilling: NotRequired[list[PrefillBody]]
    error: str | None


class MemoryBody(TypedDict):
    used: int
    budget: int
    prompt_cache: int


class PoolBody(TypedDict):
    """What the table shows of the body of /v1/pool."""

    object: Literal["pool"]
    memory: MemoryBody
    models: list[ModelBody]


def pool_of(client: httpx.Client) -> dict[str, Any]:
    """The body of the server's /v1/pool. Raises ServerError if it can't be read."""
    place = f"{client.base_url.scheme}://{client.base_url.netloc.decode()}"  # without a password
    try:
        response = client.get("/v1/pool")
    except httpx.HTTPError as error:
        raise ServerError(
            f"No server answers at {place}: {error}. Start one with `mlx-server serve`."
        ) from None
    found = parsed_json(response.content)
    try:
        if not response.is_success:
            message = found["error"]["message"]
            raise ServerError(f"{place} answers {response.status_code}: {message}")
        msgspec.convert(found, PoolBody)
    except (ValueError, TypeError, KeyError):
        pass
    else:
        return dict(found)
    raise ServerError(
        f"The server at {place} is not mlx-server (it answers {response.status_code} to "
        "/v1/pool). Set --url to yours, or start one with `mlx-server serve`."
    )


def show(pool: dict[str, Any], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, no_wrap=column != "source", overflow="fold")
    for model in pool["models"]:
        table.add_row(*map(printable, _cells(model)))
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)
    for model in pool["models"]:
        if model["error"]:
            console.print(printable(f"{model['id']} failed: {model['error']}"), soft_wrap=True)
        for row in model.get("prefilling", ()):
            console.print(printable(_prefill(model["id"], row)), soft_wrap=True)
    used, budget, cache = (_size(pool["memory"][key]) for key in ("used", "budget", "prompt_cache"))
    console.print(
        Text(f"{used} of {budget} in use, {cache} of it by the prompt cache"), soft_wrap=True
    )


def _prefill(model: str, row: dict[str, int]) -> str:
    prompt, computed = row["prompt_tokens"], row["computed_tokens"]
    return f"{model}: prefill, {computed:,} of {prompt:,} prompt tokens computed"


def _cells(model: dict[str, Any]) -> list[str]:
    progress = model["progress"]
    percent = f" {100 * progress['done'] // progress['total']} %" if progress else ""
    return [
        model["id"],
        model["family"] or "-",
        model["source"],
        "failed" if model["error"] else model["state"] + percent,
        str(model["leases"]),
        _size(model["bytes"]),
        _ago(model["last_used"]),
    ]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def _ago(moment: float | None) -> str:
    if moment is None:
        return "-"
    seconds = max(0.0, time.time() - moment)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
