"""The command line: flags in, exit code out.

Each command is a module, which is imported when the command is run, so that --help is quick.
"""

import sys
from typing import NoReturn

from mlx_server.cli.root import app
from mlx_server.cli.terminal import discard_output, prepare_streams, safe, words_of
from mlx_server.errors import ServerError, SettingsError

__all__ = ["app", "main"]


def main() -> None:
    """Exit codes: 1 an error, 2 wrong settings or flags, 130 Ctrl-C."""
    prepare_streams()
    try:
        try:
            app(prog_name="mlx-server")
        finally:
            sys.stdout.flush()
    except ServerError as error:
        _fail(error.message, 2 if isinstance(error, SettingsError) else 1)
    except BrokenPipeError:  # such as `| head -1`
        discard_output()
        sys.exit(1)
    except OSError as error:
        discard_output()
        _fail(words_of(error), 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str, code: int) -> NoReturn:
    print(safe(message), file=sys.stderr)
    sys.exit(code)
