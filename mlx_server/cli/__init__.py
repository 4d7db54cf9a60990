"""The command line: flags in, exit code out.

Each command is a file, which imports what it runs inside of its function, so that --help is quick.
"""

import io
import sys

from mlx_server.cli.root import app
from mlx_server.errors import ServerError, SettingsError

# isort: off
# fmt: off
from mlx_server.cli import (  # noqa: F401  in the order of --help
    serve, chat, connect, doctor, models, adapters, connectors, store, cache, bench, pull, replay,
    service,
)
# fmt: on
# isort: on

__all__ = ["app", "main"]


def main() -> None:
    """Exit codes: 1 an error, 2 wrong settings or flags, 130 Ctrl-C."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="mlx-server")
    except ServerError as error:
        print(error.message, file=sys.stderr)
        sys.exit(2 if isinstance(error, SettingsError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
