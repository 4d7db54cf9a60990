"""`mlx-server connectors`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_server.cli.root import ConfigFile, app
from mlx_server.cli.terminal import CONTROL, safe

if TYPE_CHECKING:
    from mlx_server.config.connectors import ConnectorSettings
    from mlx_server.mcp import StoredLogin

connectors = typer.Typer(help="Log in to MCP servers of models.yaml, or out.", no_args_is_help=True)
app.add_typer(connectors, name="connectors")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A connector of models.yaml.")]


@connectors.command()
def login(
    name: Name,
    config: ConfigFile = None,
    browser: Annotated[
        bool, typer.Option(help="Open the login page, or only show its URL.")
    ] = True,
) -> None:
    """Log in to an MCP server that requires a login (OAuth).

    \b
    mlx-server connectors login wiki
    mlx-server connectors login wiki --no-browser

    The connector has `login: true` in models.yaml. The tokens are kept in the data directory, in a
    file that only you can read. The server refreshes them, and need not be restarted.
    """
    import asyncio

    from mlx_server.mcp.callback import LoginFailed
    from mlx_server.mcp.login import LoginClient, log_in

    found, kept = _login_of(config, name)
    assert found.login
    assert found.url
    secret = found.login.client_secret
    client = LoginClient(
        found.login.client_id,
        secret.get_secret_value() if secret else None,
        found.login.issuer,
        found.login.port,
    )

    def show(page: str) -> None:
        print(CONTROL.sub("", f"Log in on this page:\n\n{page}\n"))
        if browser:
            typer.launch(page)

    try:
        tools = asyncio.run(
            log_in(found.url, kept, client, show, allow_private=found.allow_private)
        )
    except LoginFailed as failed:
        print(safe(str(failed)), file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"Logged in: {name} has {tools} tools.")


@connectors.command()
def logout(name: Name, config: ConfigFile = None) -> None:
    """Forget the tokens of a login.

    \b
    mlx-server connectors logout wiki

    They stay valid at the authorization server until they expire there.
    """
    from mlx_server.mcp.login_file import remove

    _, kept = _login_of(config, name)
    print(f"Logged out of {name}." if remove(kept.file) else f"There is no login of {name}.")


def _login_of(config: Path | None, name: str) -> "tuple[ConnectorSettings, StoredLogin]":
    from mlx_server.config.models_yaml import load_settings
    from mlx_server.config.specs import login_file
    from mlx_server.errors import SettingsError, served_names
    from mlx_server.mcp import StoredLogin

    settings = load_settings(config)
    found = settings.connectors.get(name)
    if found is None or found.login is None:
        of_logins = [name for name, each in settings.connectors.items() if each.login]
        raise SettingsError(
            f"No connector {name!r} has a `login` in models.yaml. "
            + served_names(name, of_logins).replace("Served", "These have")
        )
    return found, StoredLogin(name, login_file(settings.store.data_dir, name))
