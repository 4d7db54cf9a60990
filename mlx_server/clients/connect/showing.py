"""Shows what a client needs, and the table of clients."""

import shlex
from collections.abc import Iterator

from mlx_server.clients.connect.clients import CLIENTS, ClientRecord
from mlx_server.clients.connect.template import Connection, filled
from mlx_server.clients.connect.writing import lines_of


def listing() -> str:
    width = max(map(len, CLIENTS))
    lines = (f"{name:{width}}  {', '.join(_places(each))}\n" for name, each in CLIENTS.items())
    return "".join(lines)


def shown(client: ClientRecord, connection: Connection) -> str:
    return "\n".join(_parts(client, connection)) + "\n"


def _parts(client: ClientRecord, connection: Connection) -> Iterator[str]:
    for file in client.files:
        yield f"# {file.path}\n{lines_of(file, connection)}"
    environment = filled(client.environment, connection)
    if environment:
        either = "# or, for one session" if client.starts_without_files else "# in the environment"
        yield "\n".join([either, *(f"export {k}={shlex.quote(v)}" for k, v in environment.items())])
    yield f"# then\n{shlex.join(filled(client.command, connection))}"
    if client.note:
        yield f"# {client.note}"


def _places(client: ClientRecord) -> list[str]:
    return [file.path for file in client.files]


def markdown() -> str:
    """The table of clients, which clients/README.md contains."""
    rows = [
        f"| {each.title} | `mlx-server connect {name}` | "
        f"{', '.join(f'`{place}`' for place in _places(each))} | {each.tested or 'not driven'} |\n"
        for name, each in CLIENTS.items()
    ]
    return "".join(["| Client | Command | Files | Tested version |\n|---|---|---|---|\n", *rows])
