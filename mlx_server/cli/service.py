"""`mlx-server service`: the server as a service of the user's session."""

from typing import Annotated

import typer

from mlx_server.cli.restart import replaced
from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.config.models_yaml import find_file, load_settings
from mlx_server.system import service
from mlx_server.system.listening_sockets import url_at

app = command_app(help="Keep a server running, from login to logout.", no_args_is_help=True)


@app.command()
def install(
    config: ConfigFile = None,
    port: Annotated[int | None, typer.Option(help="Port, instead of the one in FILE.")] = None,
) -> None:
    """Start a server now and at each login.

    \b
    mlx-server service install
    mlx-server service install --config ~/models.yaml --port 9000

    It is restarted if it crashes. On a Mac it is a LaunchAgent, on Linux a systemd user unit. It
    does not see this terminal's environment variables, so put keys into models.yaml. Install again
    to change the options.
    """
    file = find_file(config)
    # shows mistakes here instead of in the service's log
    settings = load_settings(file, overrides={"port": port})
    options = ["--config", str(file.resolve())] if file else []
    options += ["--port", str(port)] if port is not None else []
    installed = service.install(options)
    url = url_at(settings.server.host, settings.server.port)
    print(f"Installed {installed.file}\nIt serves at {url}. To see its log: {installed.log}")


@app.command()
def restart(config: ConfigFile = None) -> None:
    """Replace the server by a new process; no answer ends.

    \b
    mlx-server service restart
    """
    pid = service.main_pid()
    print(replaced(config, lambda first, _: first == pid))


@app.command()
def uninstall() -> None:
    """Stop the server and remove the service.

    \b
    mlx-server service uninstall
    """
    file = service.uninstall()
    print(f"Removed {file}" if file else "No service is installed.")


@app.command()
def status() -> None:
    """Show whether the service is installed and runs.

    \b
    mlx-server service status

    The exit code is 0 if it runs, else 3.
    """
    installed = service.system()
    if not installed.file.exists():
        print("No service is installed. Install one with `mlx-server service install`.")
        raise typer.Exit(3)
    if not service.is_running():
        print(f"{installed.file} is installed but not running. To see its log: {installed.log}")
        raise typer.Exit(3)
    print(f"{installed.file} is running. To see its log: {installed.log}")
