"""`mlx-server service`: the server as a service of the user's session."""

from typing import Annotated

import typer

from mlx_server.cli.root import ConfigFile, app

service = typer.Typer(help="Keep a server running, from login to logout.", no_args_is_help=True)
app.add_typer(service, name="service")


@service.command()
def install(
    config: ConfigFile = None,
    port: Annotated[int | None, typer.Option(help="Port, instead of the one in FILE.")] = None,
) -> None:
    """Start a server now and at each login, and restart it if it crashes.

    \b
    mlx-server service install
    mlx-server service install --config ~/models.yaml --port 9000

    On a Mac it is a LaunchAgent, on Linux a systemd user unit. It does not see this terminal's
    environment variables, so put keys into models.yaml. Install again to change the options.
    """
    from mlx_server.config.models_yaml import find_file, load_settings
    from mlx_server.system.listening_sockets import url_at
    from mlx_server.system.service import install

    file = find_file(config)
    # shows mistakes here instead of in the service's log
    settings = load_settings(file, overrides={"port": port})
    options = ["--config", str(file.resolve())] if file else []
    options += ["--port", str(port)] if port is not None else []
    found = install(options)
    url = url_at(settings.server.host, settings.server.port)
    print(f"Installed {found.file}\nIt serves at {url}. To see its log: {found.log}")


@service.command()
def uninstall() -> None:
    """Stop the server and remove the service.

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
        print("No service is installed. Install one with `mlx-server service install`.")
        raise typer.Exit(3)
    if not is_running():
        print(f"{found.file} is installed but not running. To see its log: {found.log}")
        raise typer.Exit(3)
    print(f"{found.file} is running. To see its log: {found.log}")
