"""`mlx-server batch`: answers a file of requests by a running server's batches."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mlx_server.api.file_inputs import numbered_lines
from mlx_server.cli.root import ServerKey, ServerUrl, command_app
from mlx_server.clients.chat import address_of, answered, client_of, connection_errors, key_at_home
from mlx_server.errors import BadRequest, ServerError
from mlx_server.json_bounds import json_or_none
from mlx_server.system.files import replace_file
from mlx_server.system.listening_sockets import DEFAULT_URL

app = command_app()

POLL_SECONDS = 1.0
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
WINDOW = "24h"


@app.callback()
def batch() -> None:
    """Answer a file of requests, by a running server's batches."""


@app.command()
def run(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="JSON Lines, as OpenAI has them.", exists=True, dir_okay=False
        ),
    ],
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerKey = None,
) -> None:
    """Answer each line of FILE, and write the answers to FILE.output.

    \b
    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
     "body": {"model": ...}}

    \b
    mlx-server batch run requests.jsonl
    mlx-server batch run requests.jsonl --url http://studio.local:8000

    The answers come in any order: each has the custom_id of its request. Errors go to FILE.errors.
    The batch goes on in the server if the command is ended, and FILE.batch names it until then: run
    the command again to follow it. The exit code is 0 if each line has an answer, else 1.
    """
    with client_of(url, api_key or key_at_home(url)) as client, connection_errors():
        try:
            is_complete = _follow(client, file, Console())
        except KeyError as error:
            place = address_of(client.base_url)
            raise ServerError(f"{place} is not mlx-server: it gives no {error}.") from None
    if not is_complete:
        raise typer.Exit(1)


def _follow(client: httpx.Client, file: Path, console: Console) -> bool:
    """Whether each line got an answer."""
    note = _next_to(file, "batch")
    batch = _batch_before(client, note) or _created(client, file, note)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(batch["status"], total=None)
        while True:
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            status, total = batch["status"].replace("_", " "), counts["total"] or None
            progress.update(task, description=status, completed=done, total=total)
            if batch["status"] in ENDED:
                break
            time.sleep(POLL_SECONDS)
            batch = answered(client.get(f"/v1/batches/{batch['id']}"))
    for error in (batch["errors"] or {}).get("data", ()):
        place = f"line {error['line']}: " if error.get("line") else ""
        console.print(f"{place}{error['message']}", markup=False, highlight=False)
    for name, ending in (("output_file_id", "output"), ("error_file_id", "errors")):
        target = _next_to(file, ending)
        if id := batch[name]:
            _save(client, id, target)
            console.print(f"{target}", markup=False, highlight=False)
        elif batch["status"] == "completed":
            target.unlink(missing_ok=True)  # that of an earlier batch
    note.unlink(missing_ok=True)
    return bool(batch["status"] == "completed" and not batch["error_file_id"])


def _next_to(file: Path, ending: str) -> Path:
    return file.with_name(f"{file.name}.{ending}")


def _batch_before(client: httpx.Client, note: Path) -> dict[str, Any] | None:
    """The batch that an earlier command began; None if there is none, or the server has forgotten
    it."""
    try:
        id = json.loads(note.read_text())["batch"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    response = client.get(f"/v1/batches/{id}")
    return None if response.status_code == 404 else answered(response)


def _created(client: httpx.Client, file: Path, note: Path) -> dict[str, Any]:
    with file.open("rb") as lines:
        _, line = next(numbered_lines(lines), (0, b""))
        first = json_or_none(line)
        endpoint = first.get("url") if isinstance(first, dict) else None
        if not isinstance(endpoint, str):
            raise BadRequest(
                f"The first line of {file.name} is no request: it should be an object with "
                "`custom_id`, `method`, `url` and `body`."
            )
        lines.seek(0)
        sent = {"file": (file.name, lines, "application/jsonl")}
        uploaded = answered(client.post("/v1/files", data={"purpose": "batch"}, files=sent))
    asked = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": WINDOW}
    batch = answered(client.post("/v1/batches", json=asked))
    replace_file(note, json.dumps({"batch": batch["id"]}).encode())
    client.delete(f"/v1/files/{uploaded['id']}")  # the batch has its content
    return batch


def _save(client: httpx.Client, id: str, target: Path) -> None:
    draft = target.with_name(f".{target.name}.part")
    try:
        with client.stream("GET", f"/v1/files/{id}/content") as response, draft.open("wb") as out:
            response.raise_for_status()
            for piece in response.iter_bytes():
                out.write(piece)
        draft.replace(target)
    except httpx.HTTPError as error:
        raise ServerError(f"The answers can't be read: {error}. Run the command again.") from None
    finally:
        draft.unlink(missing_ok=True)
