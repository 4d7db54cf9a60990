"""`mlx-server connectors`."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.cli.terminal import CONTROL, safe
from mlx_server.config.models_yaml import load_settings
from mlx_server.config.settings import ConnectorSettings, credentials, stored_login
from mlx_server.errors import SettingsError, served_names
from mlx_server.mcp import StoredLogin
from mlx_server.mcp.addresses import names_private_host

app = command_app(help="Log in to MCP servers of models.yaml, or out.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A connector of models.yaml.")]


@app.command()
def login(
    name: Name,
    config: ConfigFile = None,
    browser: Annotated[
        bool, typer.Option(help="Open the login page, or only show its URL.")
    ] = True,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Where the browser comes back to; 0: any free port."),
    ] = 0,
) -> None:
    """Log in to an MCP server that requires a login (OAuth).

    \b
    mlx-server connectors login wiki
    mlx-server connectors login wiki --no-browser

    The connector has `login: true` in models.yaml. The tokens are kept in the data directory, in a
    file that only you can read. The server refreshes them, and need not be restarted.
    """
    from mlx_server.mcp.oauth import LoginFailed, log_in  # the SDK, which takes a second

    connector, stored = _login_of(config, name)
    assert connector.url
    client = credentials(connector.oauth) if connector.oauth else None

    def show(page: str) -> None:
        print(CONTROL.sub("", f"Log in on this page:\n\n{page}\n"))
        if browser:
            typer.launch(page)

    login = log_in(
        connector.url,
        stored,
        client,
        show,
        port=port,
        allow_private=names_private_host(connector.url),
    )
    try:
        tools = asyncio.run(login)
    except LoginFailed as failed:
        print(safe(str(failed)), file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"Logged in: {name} has {tools} tools.")


@app.command()
def logout(name: Name, config: ConfigFile = None) -> None:
    """Forget the tokens of a login.

    \b
    mlx-server connectors logout wiki

    They stay valid at the authorization server until they expire there.
    """
    _, stored = _login_of(config, name)
    print(f"Logged out of {name}." if stored.forget() else f"There is no login of {name}.")


def _login_of(config: Path | None, name: str) -> tuple[ConnectorSettings, StoredLogin]:
    settings = load_settings(config)
    connector = settings.connectors.get(name)
    if connector is None or not connector.login:
        of_logins = [name for name, each in settings.connectors.items() if each.login]
        raise SettingsError(
            f"No connector {name!r} has a `login` in models.yaml. "
            + served_names(name, of_logins).replace("Served", "These have")
        )
    return connector, stored_login(settings.store.data_dir, name)
