"""Servers, and calls, forked from a process that has imported the app: that takes most of a start.

Tests of the start itself, and those that change what Python does at its own start, begin a new
interpreter instead.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from multiprocessing.reduction import DupFd
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar
from unittest.mock import patch

from tests.hostile.outbound.sitecustomize import watch_uvloop

PRELOADED = (
    *("mlx_server.cli.serve", "mlx_server.cli.startup", "mlx_server.app", "uvloop", "tokenizers"),
    *("anyio._backends._asyncio", "tests.live.preloaded"),
)
CALL_SECONDS = 30.0
UNREAD = ("MLX_SERVER_", "PYTEST_CURRENT_TEST", "TRANSFORMERS_NO", "HF_HUB_DISABLE_TELEMETRY")
"""Prefixes of variables that no import reads, or that imports of mlx-lm and of our own set."""

T = TypeVar("T")


class ForkedProcess:
    """It has those names of `subprocess.Popen` that tests of servers use."""

    def __init__(self, process: ForkServerProcess, stdout: IO[str]) -> None:
        self._process, self.stdout = process, stdout

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("mlx-server", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def read_by_imports(environment: Mapping[str, str]) -> Mapping[str, str]:
    return {k: v for k, v in environment.items() if not k.startswith(UNREAD)}


@cache
def unchanged_environment() -> Mapping[str, str]:
    """The first call is made before any test, which may change a variable."""
    return read_by_imports(os.environ)


def can_fork(interpreter: str, environment: Mapping[str, str]) -> bool:
    """Not where a test has changed the interpreter or what modules read while they are imported;
    nor on a Mac, whose own libraries don't survive a fork without an exec."""
    is_same = (
        interpreter == sys.executable and read_by_imports(environment) == unchanged_environment()
    )
    return is_same and sys.platform == "linux"


def fork(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log: int,
    stdin: int | None = None,
) -> ForkedProcess:
    """Runs the command line `mlx-server ARGUMENTS`; log: the descriptor of its standard error.
    stdin: that of its standard input, which is empty without."""
    read, write = os.pipe()
    streams = [_Descriptor(stream) for stream in (write, log, stdin) if stream is not None]
    given = (list(arguments), dict(environment), folder, *streams)
    process = _template().Process(target=_run, args=given)
    try:
        process.start()
    finally:
        os.close(write)
    return ForkedProcess(process, os.fdopen(read, encoding="utf-8"))


def ran(
    *arguments: str,
    folder: Path | None = None,
    stdin: str = "",
    seconds: float = 120,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs the command line `mlx-server ARGUMENTS` to its end, in this environment. variables:
    others than those of this process, which none of its imports needs to see."""
    folder, environment = folder or Path.cwd(), {**os.environ, **variables}
    if not can_fork(sys.executable, os.environ):
        command = [sys.executable, "-m", "mlx_server", *arguments]
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    with TemporaryFile("w+") as given, TemporaryFile("w+") as log:
        given.write(stdin)
        given.seek(0)
        process = fork(arguments, environment, folder, log.fileno(), given.fileno())
        with process.stdout:
            try:
                output = process.stdout.read()
                code = process.wait(seconds)
            finally:
                process.kill()
        log.seek(0)
        return subprocess.CompletedProcess(arguments, code, output, log.read())


def call_in_child(
    function: Callable[..., T], *arguments: object, environment: Mapping[str, str]
) -> T:
    """Returns what a function says in a process of its own, whose environment is another. None of
    the modules that read it may be among PRELOADED, or be imported by the function's module."""
    context = _template() if sys.platform == "linux" else get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    given = (sending, dict(environment), function, arguments)
    process = context.Process(target=_call, args=given)
    with receiving:
        process.start()
        sending.close()
        try:
            assert receiving.poll(CALL_SECONDS), "it takes too long"
            answer: T = receiving.recv()
        finally:
            process.kill()
            process.join()
    return answer


def _call(
    sending: Connection,
    environment: dict[str, str],
    function: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    # the fork server was begun without them, so imports have set them
    by_imports = {k: v for k, v in os.environ.items() if k.startswith(UNREAD)}
    os.environ.clear()
    os.environ.update(by_imports | environment)
    with sending:
        sending.send(function(*arguments))


@cache
def _template() -> ForkServerContext:
    """The process to fork from. The test that happens to need it first may have changed what
    imports read."""
    context = get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    with patch.dict(os.environ, unchanged_environment(), clear=True):
        ensure_running()
    return context


class _Descriptor:
    """A file descriptor that is sent along to the process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._number),)


def _received(sent: Any) -> int:
    number: int = sent.detach()
    return number


def _run(
    arguments: list[str],
    environment: dict[str, str],
    folder: Path,
    stdout: int,
    stderr: int,
    stdin: int | None = None,
) -> None:
    for theirs, own in (stdin, 0), (stdout, 1), (stderr, 2):
        if theirs is not None:
            os.dup2(theirs, own)
            os.close(theirs)
    if stdin is not None:  # else multiprocessing has emptied it
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["mlx-server", *arguments]
    watch_uvloop()  # the fork server's own start doesn't, as it is no server
    from mlx_server.cli import main

    main()
