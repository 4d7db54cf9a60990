"""The child's end of a warm process. It serves requests one at a time until the socket at its stdin
is closed, and the operating system enforces its limits.
"""

import fcntl
import gc
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

LENGTH_BYTES = 4

Answer = Callable[[bytearray], tuple[msgspec.Struct, bytes | bytearray]]
"""Makes the reply to a frame and its payload."""


def run(warm: Callable[[], None], answer: Answer) -> None:
    """The program of a child. warm: imports what `answer` needs, since no file can be opened
    later."""
    end_with_server(int(sys.argv[2]))
    warm()
    gc.collect()
    gc.freeze()
    enter_sandbox(int(sys.argv[1]))
    serve(socket.socket(fileno=0), answer)


def serve(channel: socket.socket, answer: Answer) -> None:
    channel.sendall(bytes(LENGTH_BYTES))  # an empty frame, by which the server knows of the start
    while (frame := _received(channel)) is not None:
        reply, payload = answer(frame)
        del frame
        for part in (msgspec.msgpack.encode(reply), payload):
            channel.sendall(len(part).to_bytes(LENGTH_BYTES))
            channel.sendall(part)
        del reply, payload, part


def _received(channel: socket.socket) -> bytearray | None:
    """The next frame; None if the server has closed the socket."""
    head = _exactly(channel, LENGTH_BYTES)
    return _exactly(channel, int.from_bytes(head)) if head else None


def _exactly(channel: socket.socket, size: int) -> bytearray | None:
    data, at = bytearray(size), 0
    while at < size:
        read = channel.recv_into(memoryview(data)[at:])
        if not read:
            return None
        at += read
    return data


def end_with_server(lifeline: int) -> None:
    """Ends the process at once when the server is gone: it holds the lifeline's other end."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    # Linux kills by this signal, also a process that does not let its threads run; macOS ignores it
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    threading.Thread(target=_wait_and_end, args=(lifeline,), daemon=True).start()


def _wait_and_end(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """The kernel ends the process after this processor time, or four times as much wall-clock
    time. No request can prevent that, and it works even if the parent has ended or is stopped."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 4 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def enter_sandbox(memory: int) -> None:
    """Restrict the process for good: later imports and opened files fail."""
    for number in (signal.SIGHUP, signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    if sys.platform == "linux":  # macOS refuses to set it: there the server watches the memory
        _lower(resource.RLIMIT_AS, memory + _address_space())
    _lower(resource.RLIMIT_NOFILE, 3)  # stdin, stdout and stderr


def _lower(kind: int, size: int) -> None:
    """Set a limit, unless the hard limit is lower already: that can't be raised."""
    _, hard = resource.getrlimit(kind)
    lowest = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(kind, (lowest, lowest))


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
