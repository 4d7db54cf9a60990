"""Makes the command that starts a client with this server."""

import shutil
from collections.abc import Mapping

from mlx_server.clients.connect.clients import ClientRecord
from mlx_server.clients.connect.template import Connection, filled
from mlx_server.clients.connect.writing import changes
from mlx_server.errors import SettingsError


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
