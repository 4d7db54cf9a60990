"""Standard streams that are closed or full, and what may be written to them."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from rich.console import Console

from mlx_server.cli.terminal import print_table, safe, words_of
from tests.tables import cases

pytestmark = pytest.mark.usefixtures("folder")


def full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def unread() -> None:
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(reading)
    os.close(writing)


def closed(stream: int) -> Callable[[], None]:
    return lambda: os.close(stream)


ASK = ("chat", "--url", "http://127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
@pytest.mark.parametrize("arguments", [("--version",), ("store",)])
def test_a_full_disk_is_named(arguments: tuple[str, ...]) -> None:
    result = started(full, *arguments)
    assert result.returncode == 1
    assert "No space left on device. Check" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stream", "arguments", "code", "said"),
    [
        (unread, ("--version",), 1, ""),
        (closed(1), ("store",), 0, ""),
        (closed(2), ("store", "--config", "gone.yaml"), 2, ""),
        (closed(0), ASK, 1, "There is no question on standard input"),
    ],
)
def test_a_stream_that_is_closed(
    stream: Callable[[], None], arguments: tuple[str, ...], code: int, said: str
) -> None:
    result = started(stream, *arguments)
    assert result.returncode == code
    assert result.stderr.startswith(said)
    assert len(result.stderr.splitlines()) == bool(said)


def started(prepare: Callable[[], None], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlx_server", *arguments],
        env={**os.environ, "MLX_SERVER_DATA": os.getcwd()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=120,
        preexec_fn=prepare,
    )


@cases
def test_what_a_terminal_gets(text: str, shown: str) -> None:
    assert safe(text) == shown


def test_the_name_of_a_column_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["http://[fe80::1]:8000", "[/b]"], [["1", "2"]], Console())
    assert "http://[fe80::1]:8000  [/b]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "a b"), "'a b' can't be read or written: Perm"),
        (OSError(28, "No space left"), "The output or a file can't be read or written: No space"),
        (OSError("odd"), "The output or a file can't be read or written: odd. Check"),
    ],
)
def test_words_of_the_system(error: OSError, said: str) -> None:
    assert words_of(error).startswith(said)
