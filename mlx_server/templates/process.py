"""The server's end of the processes that render chat templates.

They are started when they are needed and stay warm; one serves all models as long as requests come
one after another. One that passes a limit is killed, and the next request gets another.
"""

import atexit
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import psutil

from mlx_server import limits
from mlx_server.errors import TemplatesUnavailable
from mlx_server.request_threads import check_wanted
from mlx_server.templates import child
from mlx_server.templates.child import (
    Compile,
    Compiled,
    OutOfMemory,
    Refused,
    Render,
    Rendered,
    Reply,
    Request,
    TooLong,
    Unknown,
)

LOOK_SECONDS = 0.05
"""A rendering that takes longer is looked at this often: its memory, and who waits for it."""

ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME", "SYSTEMROOT")
"""What a child is told of its surroundings."""

_requests = msgspec.msgpack.Encoder()
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class TemplateRefused(Exception):
    """The template can't be compiled, or refuses what it was given."""


class TemplateStopped(Exception):
    """The template passed a limit, which the text of this names."""


class _Lost(Exception):
    """The child ended by itself or has to be ended."""


class Child:
    """One process; used by one thread at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", child.__file__, str(limits.TEMPLATE_MEMORY.value)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                    # a group of its own: Ctrl-C does not reach it, and if the server dies while it
                    # is stopped, the kernel hangs up on the orphaned group
                    process_group=0,
                )
            except OSError as error:
                ours.close()
                raise TemplatesUnavailable(
                    "The process that renders chat templates can't be started: "
                    f"{error.strerror}. Try again in a moment."
                ) from None
        self._socket = ours
        self._memory = psutil.Process(self._process.pid)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Request) -> tuple[Reply, str]:
        """And the text that it rendered. Raises TemplateStopped; then the child has ended."""
        return self.ask_packed(_packed(request), request.seconds)

    def ask_packed(self, packed: bytearray, seconds: float) -> tuple[Reply, str]:
        """As `ask`; `packed` is emptied as soon as it is sent."""
        deadline = time.monotonic() + 4 * seconds + 1
        try:
            self._send(packed, seconds)
            packed.clear()
            size = int.from_bytes(self._received(child.LENGTH_BYTES, deadline))
            reply = _replies.decode(self._received(size, deadline))
            size = reply.size if isinstance(reply, Rendered) else 0
            text = self._received(size, deadline).decode()
        except TimeoutError:
            self.end()
            raise TemplateStopped(_too_slow(seconds)) from None
        except MemoryError:
            self.end()
            raise TemplateStopped(_too_much()) from None
        except (OSError, _Lost, msgspec.DecodeError, UnicodeDecodeError):
            raise TemplateStopped(self._why_it_ended(seconds)) from None
        except BaseException:
            self.end()
            raise
        if isinstance(reply, OutOfMemory):
            self.end()
        return reply, text

    def _send(self, packed: bytearray, seconds: float) -> None:
        self._socket.settimeout(4 * seconds + 1)
        self._socket.sendall(len(packed).to_bytes(child.LENGTH_BYTES))
        self._socket.sendall(packed)

    def _received(self, size: int, deadline: float) -> bytearray:
        if size > 4 * limits.TEMPLATE_CHARACTERS.value:
            raise _Lost
        found, at = bytearray(size), 0
        self._socket.settimeout(LOOK_SECONDS)
        while at < size:
            try:
                read = self._socket.recv_into(memoryview(found)[at:])
            except TimeoutError:
                self._look(deadline)
                continue
            if not read:
                raise _Lost
            at += read
        return found

    def _look(self, deadline: float) -> None:
        check_wanted()
        if time.monotonic() > deadline:
            raise TimeoutError
        try:
            size = self._memory.memory_info().rss
        except psutil.Error:
            return  # it has ended, and the socket says so
        if size > limits.TEMPLATE_MEMORY.value + (64 << 20):
            raise MemoryError

    def _why_it_ended(self, seconds: float) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        self.end()
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            return _too_slow(seconds)
        return _too_much() if code == -signal.SIGKILL else "ended its process"

    def end(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    told = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    # so that the memory of large texts goes back to the system
    return {**told, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def _too_slow(seconds: float) -> str:
    return f"takes more than {seconds} s of processor time"


def _too_much() -> str:
    return f"needs more than {limits.TEMPLATE_MEMORY.value >> 20} MiB of memory"


class TemplateProcesses:
    def __init__(self) -> None:
        self._idle: list[Child] = []
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(limits.TEMPLATE_PROCESSES.value)

    def compile(self, source: str) -> list[str]:
        """The variables that the template looks up. Raises TemplateRefused, TemplateStopped."""
        with self._child() as own:
            return _compiled(own, source)

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Raises TemplateRefused, TemplateStopped."""
        return self.render_made(source, lambda: variables)

    def render_made(self, source: str, make: Callable[[], Mapping[str, Any]]) -> str:
        """As `render`, with variables that are made when they are sent and kept no longer: they may
        take more memory than what they are made from."""
        with self._child() as own:
            reply, text = _asked(own, source, make)
            if isinstance(reply, Unknown):
                _compiled(own, source)
                reply, text = _asked(own, source, make)
        assert isinstance(_checked(reply), Rendered)
        return text

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.end()

    @contextmanager
    def _child(self) -> Iterator[Child]:
        with self._places:
            own = self._next()
            try:
                yield own
            finally:
                self._keep(own)

    def _next(self) -> Child:
        with self._lock:
            while self._idle:
                own = self._idle.pop()
                if own.is_alive:
                    return own
                own.end()
        return Child()

    def _keep(self, own: Child) -> None:
        with self._lock:
            if own.is_alive and len(self._idle) < limits.IDLE_TEMPLATE_PROCESSES.value:
                self._idle.append(own)
                return
        own.end()


def _compiled(own: Child, source: str) -> list[str]:
    reply, _ = own.ask(Compile(digest_of(source), source, limits.TEMPLATE_SECONDS.value))
    reply = _checked(reply)
    assert isinstance(reply, Compiled)
    return reply.reads


def _asked(own: Child, source: str, make: Callable[[], Mapping[str, Any]]) -> tuple[Reply, str]:
    seconds, most = limits.TEMPLATE_SECONDS.value, limits.TEMPLATE_CHARACTERS.value
    return own.ask_packed(_packed(Render(digest_of(source), dict(make()), seconds, most)), seconds)


def digest_of(source: str) -> bytes:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()


def _checked(reply: Reply) -> Reply:
    match reply:
        case Refused(message):
            raise TemplateRefused(message)
        case OutOfMemory():
            raise TemplateStopped(_too_much())
        case TooLong():
            most = limits.TEMPLATE_CHARACTERS.value
            raise TemplateStopped(f"makes a prompt of more than {most} characters")
    return reply


def _packed(asked: Request) -> bytearray:
    packed = bytearray()
    try:
        _requests.encode_into(asked, packed)
    except OverflowError:
        assert isinstance(asked, Render)
        asked.variables = _with_big_numbers(asked.variables)
        _requests.encode_into(asked, packed)
    return packed


def _with_big_numbers(value: Any) -> Any:
    """msgpack itself ends at 64 bits."""
    match value:
        case bool():
            return value
        case int() if value.bit_length() > 63:
            data = value.to_bytes(value.bit_length() // 8 + 1, signed=True)
            return msgspec.msgpack.Ext(child.BIG_NUMBER, data)
        case list() | tuple():
            return [_with_big_numbers(item) for item in value]
        case dict():
            return {key: _with_big_numbers(item) for key, item in value.items()}
    return value


PROCESSES = TemplateProcesses()
atexit.register(PROCESSES.close)
