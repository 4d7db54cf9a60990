"""Shows what a client needs, and the table of clients in the documents."""

import shlex
from collections.abc import Iterator

from mlx_server.clients.connect.clients import CLIENTS, ClientRecord
from mlx_server.clients.connect.template import Connection, filled
from mlx_server.clients.connect.writing import lines_of

SAMPLE = Connection("http://127.0.0.1:8000", "none", "qwen3-4b", 40_960)
"""The connection that the documents show."""


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
    """The table of clients, and a section on each, from the same records."""
    rows = [
        f"| [{each.title}](#{_anchor(each)}) | `mlx-server connect {name}` | "
        f"{', '.join(f'`{place}`' for place in _places(each))} | {each.tested or 'not driven'} |\n"
        for name, each in CLIENTS.items()
    ]
    head = "| Client | Command | Files | Tested version |\n|---|---|---|---|\n"
    sections = (
        f"\n### {each.title}\n\n```text\n{shown(each, SAMPLE)}```\n" for each in CLIENTS.values()
    )
    return "".join([head, *rows, *sections])


def _anchor(client: ClientRecord) -> str:
    return client.title.lower().replace(" ", "-")
