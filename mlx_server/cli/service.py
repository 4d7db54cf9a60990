"""`mlx-server service`: installed for the user, kept by the system."""

from pathlib import Path
from typing import Annotated

import typer

from mlx_server.cli.root import app

service = typer.Typer(
    help="Keep a server running, from one login to the next.", no_args_is_help=True
)
app.add_typer(service, name="service")


@service.command()
def install(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rather than ./models.yaml.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Rather than the one that FILE says.")] = None,
) -> None:
    """Start a server now and at each login, and again if it ends by itself.

    \b
    mlx-server service install
    mlx-server service install --config ~/models.yaml --port 9000

    On a Mac it is a LaunchAgent, on Linux a user unit of systemd. It does not see the variables of
    this terminal: keys belong into models.yaml then. Installing again takes new options over.
    """
    from mlx_server.config.models_yaml import find_file, load_settings
    from mlx_server.system.service import install

    file = find_file(config)
    settings = load_settings(file)  # what is wrong in it is said here, not in a log
    options = ["--config", str(file.resolve())] if file else []
    options += ["--port", str(port)] if port is not None else []
    found = install(options)
    address = f"http://{settings.server.host}:{port or settings.server.port}"
    print(f"Installed {found.file}\nIt serves on {address}; its log: {found.log}")


@service.command()
def uninstall() -> None:
    """Stop the server and keep it no longer.

    \b
    mlx-server service uninstall
    """
    from mlx_server.system.service import uninstall

    file = uninstall()
    print(f"Removed {file}" if file else "No service is installed.")


@service.command()
def status() -> None:
    """Show whether the service is installed and runs.

    \b
    mlx-server service status

    The exit code is 0 if it runs, else 3.
    """
    from mlx_server.system.service import is_running, system

    found = system()
    if not found.file.exists():
        print("No service is installed: `mlx-server service install`.")
        raise typer.Exit(3)
    if not is_running():
        print(f"{found.file} is installed, and nothing runs. Its log: {found.log}")
        raise typer.Exit(3)
    print(f"{found.file} runs. Its log: {found.log}")
