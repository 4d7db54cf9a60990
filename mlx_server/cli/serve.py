"""`mlx-server serve`."""

import gc
import os
from pathlib import Path
from typing import Annotated

import typer

from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.cli.terminal import safe
from mlx_server.errors import SettingsError

app = command_app()

Models = Annotated[
    list[str] | None, typer.Argument(metavar="PATH_OR_ID", help="Folders or hub ids to serve.")
]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one [8000].")]
Keys = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY", help="A key that clients may use; repeat the flag for more."),
]
LogFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write all output to this file; rotated at 10 MB."),
]
Hostfile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Split the models over the hosts of this hostfile."),
]
Discover = Annotated[
    bool, typer.Option("--discover", help="Also serve the models that `models --local` finds.")
]


@app.command()
def serve(
    models: Models = None,
    config: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Port = None,
    api_key: Keys = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Answers decoded in one batch [16].")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error [info].")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json [text].")] = None,
    log_file: LogFile = None,
    hostfile: Hostfile = None,
    discover: Discover = False,
) -> None:
    """Serve models until Ctrl-C.

    \b
    mlx-server serve
    mlx-server serve ./models/qwen3 mlx-community/Llama-3.2-1B-Instruct-4bit
    mlx-server serve --config team.yaml --port 9000
    MLX_SERVER_API_KEYS=secret mlx-server serve --host 0.0.0.0
    mlx-server serve --hostfile hosts.json mlx-community/Qwen3-235B-A22B-4bit

    Without PATH_OR_ID the models of models.yaml are served; without that file, a small demo model.
    MLX_SERVER_HOST, MLX_SERVER_PORT, MLX_SERVER_API_KEYS (comma separated) and MLX_SERVER_CONFIG
    do the same as the flags. Other users of this machine can read keys given as a flag.
    """
    from mlx_server.system import logs
    from mlx_server.system.handover import reported_refusal

    logs.configure("info", "json" if log_format == "json" else "text")  # before imports can fail

    overrides = {
        "host": host,
        "port": port,
        "api_keys": tuple(api_key) if api_key else None,
        "concurrency": concurrency,
        "log_level": log_level,
        "log_format": log_format,
    }
    with logs.logged_end(), reported_refusal():
        terminal = os.dup(2)
        if log_file:
            from mlx_server.system.logs import write_to

            write_to(log_file)
        gc.disable()  # nothing that is imported is garbage; to look takes an eighth of the start
        try:
            from mlx_server.cli.startup import checked_settings

            chosen = models or ()
            settings = checked_settings(config, chosen, overrides, hostfile, discover=discover)
            from mlx_server.app import run
        except SettingsError as error:
            if log_file:  # which has it too
                os.write(terminal, f"{safe(error.message)}\n".encode())
            raise
        finally:
            os.close(terminal)
            gc.freeze()
            gc.enable()
        run(settings, log_file)
