"""The child's end of a warm process: frames, the end of the socket, and the kernel's limits."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from threading import Thread

import pytest

from mlx_server.system.sandbox import child
from mlx_server.system.sandbox.child import LENGTH_BYTES, Served, serve

HANG = 10.0


class Parent:
    """The server's end of a child that runs in a thread."""

    def __init__(self, answer: Callable[[bytearray], Served]) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(HANG)

        def serving() -> None:
            with theirs:
                serve(theirs, answer)

        self.thread = Thread(target=serving, daemon=True)
        self.thread.start()

    def read(self) -> bytes:
        size = int.from_bytes(self._exactly(LENGTH_BYTES))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self.socket.recv(size - len(found))
            assert part, "the child has ended"
            found += part
        return found

    def ask(self, frame: bytes) -> tuple[bytes, bytes]:
        self.socket.sendall(len(frame).to_bytes(LENGTH_BYTES) + frame)
        return self.read(), self.read()

    def close(self) -> None:
        self.socket.close()

    def has_ended(self) -> bool:
        self.thread.join(HANG)
        return not self.thread.is_alive()


Start = Callable[[Callable[[bytearray], Served]], Parent]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as started:
        yield lambda answer: started.enter_context(closing(Parent(answer)))


def echo(frame: bytearray) -> Served:
    return Served(bytes(frame), frame[::-1], is_last=frame == b"last")


@pytest.mark.parametrize("sent", [b"", b"\0", (9).to_bytes(LENGTH_BYTES), b"\0\0\0\5abc"])
def test_a_server_that_dies_within_a_frame_ends_it(start: Start, sent: bytes) -> None:
    asked: list[bytearray] = []
    parent = start(lambda frame: asked.append(frame) or echo(frame))  # type: ignore[func-returns-value]
    parent.read()
    parent.socket.sendall(sent)
    parent.socket.close()
    assert parent.has_ended()
    assert asked == []


def run(code: str) -> subprocess.CompletedProcess[str]:
    """As a program that knows nothing but the child's own file."""
    path = f"import sys; sys.path.insert(0, {os.path.dirname(child.__file__)!r})\n"
    command = [sys.executable, "-I", "-c", path + "import child\n" + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("work", "signals"),
    [
        ("while True: pass", (signal.SIGPROF, signal.SIGALRM)),
        ("import time; time.sleep(30)", (signal.SIGALRM,)),
    ],
)
def test_the_kernel_ends_what_takes_too_long(work: str, signals: tuple[signal.Signals]) -> None:
    code = (
        "import time\nchild.enter_sandbox(1 << 30)\nprint('begun', flush=True)\n"
        f"with child.time_limit(0.1):\n    {work}"
    )
    ended = run(code)
    assert -ended.returncode in signals
    assert ended.stdout == "begun\n"


def test_a_limit_ends_with_its_request_also_if_that_fails() -> None:
    code = (
        "import time\nchild.enter_sandbox(1 << 30)\n"
        "for error in (ValueError, MemoryError):\n"
        "    try:\n"
        "        with child.time_limit(0.05):\n            raise error\n"
        "    except error:\n        pass\n"
        "time.sleep(0.4)\nprint('alive')"
    )
    assert run(code).stdout == "alive\n"


def test_the_sandbox_does_not_depend_on_what_the_server_set() -> None:
    """A signal that the server ignores is not ignored by its child, and lower limits stay."""
    code = (
        "import resource, signal\n"
        "numbers = signal.SIGHUP, signal.SIGPROF, signal.SIGALRM\n"
        "for number in numbers:\n    signal.signal(number, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "child._lower(resource.RLIMIT_NOFILE, 100)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "child.enter_sandbox(1 << 30)\n"
        "print({signal.getsignal(number) for number in numbers} == {signal.SIG_DFL})\n"
        "for kind in ('CORE', 'FSIZE', 'NOFILE'):\n"
        "    print(resource.getrlimit(getattr(resource, 'RLIMIT_' + kind)))\n"
    )
    lines = run(code).stdout.splitlines()
    assert lines == ["(64, 64)", "True", "(0, 0)", "(0, 0)", "(3, 3)"]
