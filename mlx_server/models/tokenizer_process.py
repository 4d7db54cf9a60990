"""The server's end of the process that reads a model's tokenizer.json and makes its ids.

The library blocks every thread while it reads a file, for seconds if it is large. A call costs a
few hundredths of a millisecond more than one in this process, and takes less of this one's time.
"""

import queue
import socket
import struct
import subprocess
import sys
import threading
import weakref
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mlx_server import limits
from mlx_server.errors import ModelReplaced, ModelUnusable, TokenizerUnavailable
from mlx_server.models.tokenizer_file import Spans, TokenizerFacts
from mlx_server.system.sandbox.child import LENGTH_BYTES
from mlx_server.system.sandbox.parent import FROM_OUTSIDE, child_environment

SHORT, SHORT_TEXTS = 32, 256
"""The characters of a text whose ids are kept, and how many of these are. A template writes the
same few into each prompt, and a prompt's branches are found by them."""

CONNECTIONS = limits.MODEL_REQUEST_THREADS
"""One for each thread that may work for the model."""

PROGRAM = Path(__file__).with_name("tokenizer_child.py")

T = TypeVar("T")


class TokenizerRefusal(msgspec.Struct, tag=True):
    """A reply: why the file can't be used, for a ModelUnusable."""

    message: str


class _TokenizerLost(Exception):
    """The child has ended, does not reply, or was given up by another thread."""


class TokenizerProcess:
    """Makes the calls of a TokenizerFile in another process, which is replaced if it ends."""

    def __init__(self, path: Path) -> None:
        """Raises ModelUnusable."""
        self._path = path
        self._lock = threading.Lock()
        self._short = lru_cache(maxsize=SHORT_TEXTS)(self._marked)
        self._child, self._facts = self._started()

    def facts(self) -> TokenizerFacts:
        return self._facts

    def encode(self, text: str, special: bool) -> list[int]:
        return self._call(list[int], "encode", text, special)

    def encode_pair(self) -> tuple[list[int], list[int]]:
        return self._call(tuple[list[int], list[int]], "encode_pair")

    def encode_marking(self, text: str) -> tuple[list[int], Spans]:
        if len(text) > SHORT:
            return self._marked(text)
        ids, spans = self._short(text)
        return [*ids], [*spans]

    def _marked(self, text: str) -> tuple[list[int], Spans]:
        return self._call(tuple[list[int], Spans], "encode_marking", text)

    def encode_character(self, character: str) -> list[int]:
        return self._call(list[int], "encode_character", character)

    def decode(self, ids: list[int], skip: bool) -> str:
        return self._call(str, "decode", ids, skip)

    def _call(self, kind: type[T], *call: Any) -> T:
        packed = msgspec.msgpack.encode(call)
        for _ in range(2):
            child = self._child
            try:
                reply = child.exchange(packed)
            except _TokenizerLost:
                self._replace(child)
            else:
                return _checked(reply, kind)
        raise TokenizerUnavailable(
            f"The process that tokenises for {self._path.parent.name!r} has ended twice. Try again "
            "in a moment."
        )

    def _replace(self, lost: "_Child") -> None:
        with self._lock:
            if self._child is not lost:  # another thread has replaced it
                return
            self._child, facts = self._started()
        if facts != self._facts:
            raise ModelReplaced("The model's tokenizer.json was replaced. Send the request again.")

    def _started(self) -> "tuple[_Child, TokenizerFacts]":
        child = _Child(self._path)
        try:
            facts = _checked(child.receive_first(), TokenizerFacts)
        except BaseException:
            child.end()
            raise
        weakref.finalize(self, child.end)
        return child, facts


class _Child:
    def __init__(self, path: Path) -> None:
        self._free: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        """Connections without a call; None: the child was given up."""
        with ExitStack() as theirs, ExitStack() as unless_it_starts:
            pairs = [socket.socketpair() for _ in range(CONNECTIONS)]
            for ours, other in pairs:
                unless_it_starts.enter_context(ours)
                theirs.enter_context(other)
                _limit_waits(ours)
            descriptors = [other.fileno() for _, other in pairs]
            try:
                self._process = _run(path, descriptors)
            except OSError as error:
                raise TokenizerUnavailable(
                    f"The process that reads tokenizers can't be started: {error.strerror}. Try "
                    "again in a moment."
                ) from None
            unless_it_starts.pop_all()
        for ours, _ in pairs:
            self._free.put(ours)

    def receive_first(self) -> bytes:
        """What the child sends before any call."""
        try:
            return self._exchange(b"")
        except _TokenizerLost:
            raise self._why_it_ended() from None

    def exchange(self, packed: bytes) -> bytes:
        """Raises _TokenizerLost, after which the child has ended."""
        return self._exchange(len(packed).to_bytes(LENGTH_BYTES) + packed)

    def _exchange(self, frame: bytes) -> bytes:
        if (connection := self._free.get()) is None:
            self._free.put(None)  # for the next thread that waits
            raise _TokenizerLost
        try:
            connection.sendall(frame)
            reply = _received(connection)
        except BaseException as error:
            with suppress(subprocess.TimeoutExpired):  # it may be about to end by itself
                self._process.wait(0.2)
            self.end()
            connection.close()
            if isinstance(error, OSError):
                raise _TokenizerLost from None
            raise
        self._free.put(connection)
        return reply

    def _why_it_ended(self) -> Exception:
        if self._process.returncode in FROM_OUTSIDE:
            return TokenizerUnavailable(
                "The process that reads the model's tokenizer was ended, or did not get enough "
                "processor time. Try again in a moment."
            )
        return ModelUnusable(
            "Reading tokenizer.json of this model ended the process that reads it, which may have "
            f"{limits.TOKENIZER_MEMORY >> 20} MiB of memory. Download the model again."
        )

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(queue.Empty):
            while connection := self._free.get_nowait():
                connection.close()
        self._free.put(None)


def _run(path: Path, descriptors: list[int]) -> subprocess.Popen[bytes]:
    memory = str(limits.TOKENIZER_MEMORY)
    return subprocess.Popen(
        [sys.executable, "-I", str(PROGRAM), memory, str(path), *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
        # each call has one text, so the library's threads would only take memory
        env={**child_environment(), "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2"},
        process_group=0,
    )


def _limit_waits(connection: socket.socket) -> None:
    """As options of the socket: with `settimeout` each call would also wait for the GIL twice."""
    wait = struct.pack("ll", int(limits.TOKENIZER_SECONDS), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, wait)


def _received(connection: socket.socket) -> bytes:
    """One reply. Raises OSError."""
    data, size = bytearray(), LENGTH_BYTES
    while len(data) < size:
        part = connection.recv(1 << 16)  # more would be mapped for each call
        if not part:
            raise ConnectionResetError
        data += part
        if len(data) >= LENGTH_BYTES:
            size = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES])
    return bytes(memoryview(data)[LENGTH_BYTES:])


def _checked(reply: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(reply, type=kind)
    except msgspec.DecodeError:
        refusal = msgspec.msgpack.decode(reply, type=TokenizerRefusal)
        raise ModelUnusable(refusal.message) from None
