"""`--log-file`: all output of the server and its engine goes to a file that is rotated.

Standard output and error become a pipe. A child process keeps the descriptors that it inherits, so
without the pipe it would go on writing to a file that was rotated away.
"""

import atexit
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from threading import Thread

from mlx_server import limits
from mlx_server.errors import SettingsError
from mlx_server.system.own_files import not_linked, own_path

CHUNK_BYTES = 1 << 16
LAST_LINES_SECONDS = 1.0
"""The time that the process waits at its end for its final lines to be written."""


class _LogFile(RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        """Opens the file, also after each rotation."""
        return open(self.baseFilename, "a", encoding=self.encoding, opener=not_linked)


def write_to(path: Path, rotate_bytes: int = limits.LOG_FILE_BYTES) -> None:
    """Redirects the output of this process and of those that it starts from now on.

    Raises SettingsError if the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _LogFile(
            own_path(path),
            maxBytes=rotate_bytes,
            backupCount=limits.LOG_FILES,
            encoding="utf-8",
        )
    except OSError as error:
        raise SettingsError(
            f"--log-file: {path.name!r} can't be written: {error.strerror}."
        ) from error
    reading, writing = os.pipe()
    copying = Thread(target=_copy, args=(reading, file), daemon=True)
    copying.start()
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(writing, stream)
    os.close(writing)
    atexit.register(_finish, copying)


def _copy(reading: int, file: RotatingFileHandler) -> None:
    """Writes only whole lines, so that rotation does not split a line."""
    rest = b""
    while data := os.read(reading, CHUNK_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            _write(file, line + b"\n")
        if len(rest) > CHUNK_BYTES:
            _write(file, rest)
            rest = b""
    _write(file, rest)


def _write(file: RotatingFileHandler, data: bytes) -> None:
    with suppress(OSError):  # a full disk must not end the server
        if file.stream is None:
            file.stream = file._open()
        file.stream.write(data.decode("utf-8", "replace"))
        file.stream.flush()
        if file.stream.tell() >= file.maxBytes:
            file.doRollover()


def _finish(copying: Thread) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        with suppress(OSError):
            os.close(stream)
    copying.join(LAST_LINES_SECONDS)
