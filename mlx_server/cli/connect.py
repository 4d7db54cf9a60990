"""`mlx-server connect`."""

import os
from typing import Annotated

import typer

from mlx_server.cli.root import ServerKey, ServerUrl, command_app
from mlx_server.clients.chat import key_at_home
from mlx_server.clients.connect import (
    CLIENTS,
    after_writing,
    changes,
    command_of,
    connection_to,
    listing,
    shown,
)
from mlx_server.clients.connect import markdown as table
from mlx_server.clients.connect import write as written
from mlx_server.errors import SettingsError, nearest_names
from mlx_server.system.listening_sockets import DEFAULT_URL

app = command_app()


@app.command()
def connect(
    client: Annotated[
        str | None, typer.Argument(metavar="CLIENT", help="A client; without one, all are listed.")
    ] = None,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerKey = None,
    model: Annotated[str | None, typer.Option(metavar="ID", help="Model [the first].")] = None,
    context_length: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Context length [the server's].")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Put the lines into the client's files.")
    ] = False,
    run: Annotated[bool, typer.Option("--run", help="Start the client.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Show all clients as Markdown.")
    ] = False,
) -> None:
    """Let a coding agent or another client use this server.

    \b
    mlx-server connect                      which clients there are
    mlx-server connect codex                the lines that Codex needs, and where
    mlx-server connect codex --write --run  write them (with a backup), start it
    mlx-server connect claude --run         Claude Code, for this one session
    """
    if client is None:
        print(table() if markdown else listing(), end="")
        return
    if client not in CLIENTS:
        nearest = ", ".join(nearest_names(client, CLIENTS))
        raise SettingsError(
            f"There is no client {client[:100]!r} here. The nearest: {nearest}. "
            "`mlx-server connect` lists all."
        )
    record = CLIENTS[client]
    connection = connection_to(url, api_key or key_at_home(url), model, context_length)
    if not write and not run:
        print(shown(record, connection), end="")
        return
    if write:
        for sentence in written(changes(record, connection)):
            print(sentence)
        if not run:
            print(after_writing(record, connection), end="")
    if run:
        command, environment = command_of(client, record, connection)
        os.execvpe(command[0], command, {**os.environ, **environment})  # noqa: S606
