"""The command line: flags in, exit code out.

Each command is a module, which is imported when the command is run, so that --help is quick.
"""

import sys
from types import TracebackType
from typing import NoReturn


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows nothing of a Ctrl-C that comes while the modules below are imported."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _report

from mlx_server.cli.root import app  # noqa: E402
from mlx_server.cli.terminal import discard_output, prepare_streams, safe, words_of  # noqa: E402
from mlx_server.errors import ServerError, SettingsError  # noqa: E402

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
