"""`mlx-server connect`: makes other makers' clients use this server, by the settings of each.

`connect.yaml` has the clients, `client_files.py` writes their files.
"""

import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import msgspec
import yaml

from mlx_server.clients.chat import checked_url, client_of, first_model, model_facts
from mlx_server.clients.client_files import ClientRecord, Connection, changes, filled, lines_of
from mlx_server.errors import BadRequest, SettingsError

CLIENTS: Mapping[str, ClientRecord] = MappingProxyType(
    msgspec.convert(
        yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")),
        dict[str, ClientRecord],
    )
)

NO_KEY = "none"
"""The key in the settings for a server that needs none, since most clients refuse an empty key."""

NO_FILE = "none"


def connection_to(url: str, key: str, model: str | None, context: int | None) -> Connection:
    """The connection for a client's settings. A model or context length that is not given is
    requested from the server.

    Raises ServerError if `url` is no URL, if no server answers, or if it does not know the model or
    its context length.
    """
    base = url.rstrip("/").removesuffix("/v1")
    checked_url(base)
    facts: Mapping[str, Any] = {}
    if model is None or context is None:
        with client_of(base, key) as client:
            model = model or first_model(client)
            facts = {} if context else _facts(client, model)
    inputs = (facts.get("architecture") or {}).get("input_modalities") or ("text",)
    length = context or _context_of(facts, model)
    return Connection(base, key or NO_KEY, model, length, tuple(map(str, inputs)))


def _facts(client: httpx.Client, model: str) -> Mapping[str, Any]:
    try:
        return model_facts(client, model)
    except BadRequest as error:
        raise SettingsError(error.message) from None


def _context_of(facts: Mapping[str, Any], model: str) -> int:
    context = facts.get("context_length")
    if type(context) is not int:
        raise SettingsError(
            f"That server does not know yet how long the context of {model} is. Set it with "
            "--context-length, or send the model a request first."
        )
    return context


def listing() -> str:
    width = max(map(len, CLIENTS))
    lines = (
        f"{name:{width}}  {', '.join(each.places) or NO_FILE}\n" for name, each in CLIENTS.items()
    )
    return "".join(lines)


def shown(client: ClientRecord, connection: Connection) -> str:
    return "\n".join(_parts(client, connection)) + "\n"


def _parts(client: ClientRecord, connection: Connection) -> Iterator[str]:
    for file in client.files:
        yield f"# {file.place}\n{lines_of(file, connection)}"
    environment = filled(client.environment, connection)
    if environment:
        either = "# or, for one session" if client.starts_without_files else "# in the environment"
        yield "\n".join([either, *(f"export {k}={shlex.quote(v)}" for k, v in environment.items())])
    yield f"# then\n{shlex.join(filled(client.command, connection))}"
    if client.note:
        yield f"# {filled(client.note, connection)}"


def markdown() -> str:
    """The table of clients, which clients/README.md contains."""
    rows = [
        f"| {each.title} | `mlx-server connect {name}` | "
        f"{', '.join(f'`{place}`' for place in each.places) or NO_FILE} | "
        f"{each.tested or 'not driven'} |\n"
        for name, each in CLIENTS.items()
    ]
    return "".join(["| Client | Command | Files | Tested version |\n|---|---|---|---|\n", *rows])


def command_of(
    name: str, client: ClientRecord, connection: Connection
) -> tuple[list[str], Mapping[str, str]]:
    """The command that starts the client, and the environment variables to add for it.

    Raises SettingsError if the client is not installed or needs files that are not written yet.
    """
    if not client.starts_without_files:
        missing = [each.path for each in changes(client, connection) if each.is_needed]
        if missing:
            raise SettingsError(
                f"{client.title} reads {', '.join(map(str, missing))}, which lacks these lines. "
                f"Add --write, or see them with `mlx-server connect {name}`."
            )
    command = filled(client.command, connection)
    if shutil.which(command[0]) is None:
        raise SettingsError(f"There is no command `{command[0]}`: install {client.title} first.")
    return command, filled(client.environment, connection)
