"""`mlx-server restart`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.config.models_yaml import load_settings
from mlx_server.errors import ServerError
from mlx_server.system import handover, servers

app = command_app()


@app.command()
def restart(
    config: ConfigFile = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the server, if several of yours run.")
    ] = None,
) -> None:
    """Replace a running server by a new process, without ending an answer.

    \b
    mlx-server restart
    mlx-server restart --port 9000

    The new one reads settings and code again, and takes the requests when its models are loaded;
    the old one ends when its answers have. No connection is refused. If the new one can't start,
    the old one goes on, and the exit code is 1.
    """
    print(replaced(config, lambda pid, url: port is None or url.endswith(f":{port}")))


def replaced(config: Path | None, wanted: Callable[[int, str], bool]) -> str:
    """Replaces the server whose process id and URL are wanted. Raises ServerError if there is not
    exactly one, or if it goes on."""
    data_dir = load_settings(config).store.data_dir
    assert data_dir is not None
    running = {
        each.pid: each.url for each in servers.Servers(data_dir).others().values() if each.pid
    }
    named = [pid for pid, url in running.items() if wanted(pid, url)]
    if len(named) != 1:
        urls = ", ".join(sorted(running.values()))
        how = f"Of the servers that run ({urls}) name one by --port" if urls else "No server runs"
        raise ServerError(
            f"{how}. One that has another data directory than {data_dir.name!r} is found by its "
            "--config or its MLX_SERVER_DATA."
        )
    return handover.ask(data_dir / servers.FOLDER, named[0])
