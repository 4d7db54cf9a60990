"""Logging: one record a line, as text or JSON, with the request's id.

Logs can be shared: they have no text of a prompt, no key and no folder of this machine. The message
of an exception may quote any of these, so a traceback shows only types and places.

With `--log-file` all output of the server and its engine goes to a file that is rotated. Standard
output and error become a pipe: a child process keeps the descriptors that it inherits, so it would
go on writing to a file that was rotated away.
"""

import atexit
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from threading import Thread
from typing import Any, TextIO, cast

from mlx_server import limits
from mlx_server.errors import FOLDERS, SettingsError, public_message
from mlx_server.system.files import not_linked, own_path

COLOURS = {"DEBUG": "\033[2m", "INFO": "\033[32m", "WARNING": "\033[33m", "ERROR": "\033[31m"}
FORMAT_VARIABLE = "MLX_SERVER_LOG_FORMAT"
"""Environment variable that passes the format to the engine process."""

UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
MODULE = re.compile(r"\w+(?>\.\w+)*+")
ACCESS = "mlx_server.access"
LIBRARIES = re.compile(r"^.*/(?:site-packages|lib/python3\.\d+)/")
OURS = f"{Path(__file__).parents[2]}/"

CALLERS = 12
"""The number of frames of a traceback that are logged, the innermost ones."""


@dataclass
class RequestLogContext:
    """The parts of a request that logs show; over a WebSocket, of each response."""

    id: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model: str | None = None
    """The id of a model in models.yaml."""
    family: str | None = None


request_context: ContextVar[RequestLogContext | None] = ContextVar("request_context", default=None)


def log_model(model: str, family: str) -> None:
    """Names the model that answers the present request in its log line."""
    if turn := request_context.get():
        turn.model, turn.family = model, family


def configure(level: str, style: str) -> None:
    """Sets up logging in the server or the engine process."""
    os.environ[FORMAT_VARIABLE] = style
    lines: logging.Formatter = ColouredFormatter() if sys.stderr.isatty() else PlainFormatter()
    output = logging.StreamHandler(cast(TextIO, _StandardError()))
    output.setFormatter(JsonFormatter() if style == "json" else lines)
    # below this level libraries log what they send and receive
    logging.basicConfig(level=logging.WARNING, handlers=[output, RecentLines()], force=True)
    logging.getLogger("mlx_server").setLevel(level.upper())
    if not sys.warnoptions:  # Python's warnings are for developers, and show paths
        warnings.simplefilter("ignore")
    logging.raiseExceptions = False  # errors of logging itself would print paths and arguments
    sys.excepthook = lambda _, error, __: _ended_by(error)
    threading.excepthook = lambda unhandled: _ended_by(unhandled.exc_value)
    sys.unraisablehook = lambda unhandled: _unraisable(unhandled.exc_value)


class _StandardError:
    """What `sys.stderr` is at the moment: a progress bar puts itself there, to stay below the
    lines of the log."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


@contextmanager
def logged_end() -> Iterator[None]:
    """Ends the process at an OSError with a line of the log, which names no folder; the command
    line would say the file's whole path."""
    try:
        yield
    except OSError as error:
        _ended_by(error)
        sys.exit(1)


def _ended_by(error: BaseException | None) -> None:
    logging.getLogger("mlx_server").critical("a thread ended with an error", exc_info=error)


def _unraisable(error: BaseException | None) -> None:
    logging.getLogger("mlx_server").error(
        "an error was ignored, since it occurred where none can be raised", exc_info=error
    )


class PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        now = request_context.get()
        parts = (
            f"{self.formatTime(record)} {record.levelname:<7} {record.name}:",
            discreet_message(record),
            now.id if now else "",
        )
        line = " ".join(filter(None, parts))
        return "\n".join([line, *_traceback_of(record)])


class ColouredFormatter(PlainFormatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        level = f"{record.levelname:<7}"
        return line.replace(level, f"{COLOURS.get(record.levelname, '')}{level}\033[0m", 1)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        now, lines = request_context.get(), list(_traceback_of(record))
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": discreet_message(record),
            **({"request_id": now.id} if now else {}),
            **getattr(record, "facts", {}),
            **({"traceback": lines} if lines else {}),
        }
        return json.dumps(fields)


recent_lines: deque[dict[str, Any]] = deque(maxlen=limits.LISTED_LOG_LINES)
"""The latest lines of this process, for the page."""


class RecentLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "facts", {}).get("route", "").startswith("/page/"):
            return  # the page would list its own requests
        try:
            text = "\n".join([discreet_message(record), *_traceback_of(record)])
        except Exception:  # the arguments of a library's message don't fit: no error of its caller
            self.handleError(record)
            return
        line = {"at": record.created, "level": record.levelname.lower(), "logger": record.name}
        recent_lines.append({**line, "message": text[: limits.LISTED_TEXT]})


def discreet_message(record: logging.LogRecord) -> str:
    """The message without control characters and parent folders of paths; URLs are kept."""
    message = record.getMessage()
    discreet = message if record.name == ACCESS else FOLDERS.sub("", message)
    return UNPRINTABLE.sub(lambda character: ascii(character[0])[1:-1], discreet)


def _traceback_of(record: logging.LogRecord) -> Iterator[str]:
    error = record.exc_info[1] if record.exc_info else None
    if error:
        yield "Traceback:"
        yield from _places(error)


def _places(error: BaseException) -> Iterator[str]:
    """The lines of a traceback: causes first, the innermost frame last, as Python prints it."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for each in (*([before] if before else []), *inner):
        yield from _places(each)
    for frame in traceback.extract_tb(error.__traceback__)[-CALLERS:]:
        file = LIBRARIES.sub("", frame.filename.removeprefix(OURS))
        place = Path(file).name if file.startswith("/") else file
        yield f"  {place}:{frame.lineno} {frame.name}"
    yield _ending(error)


def _ending(error: BaseException) -> str:
    """The error's type, with its message only if that can quote no prompt: messages of the system,
    and of MLX, which begin with `[function]`."""
    name = type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        return f"{name}: {error.strerror}"
    if isinstance(error, ImportError) and error.name and MODULE.fullmatch(error.name):
        return f"{name}: {error.name}"
    return public_message(error) if str(error).startswith("[") else name


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
            own_path(path), maxBytes=rotate_bytes, backupCount=limits.LOG_FILES, encoding="utf-8"
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
