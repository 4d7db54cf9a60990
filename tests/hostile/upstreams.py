"""A hostile upstream: what it sends to a gateway, byte by byte, and a server that sends it."""

import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, repeat
from threading import Event, Thread
from typing import Any

Stream = Callable[[int], Iterator[bytes]]
"""Yields an answer of about so many bytes."""

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
PIECE = 64 << 10


def event(finish: str | None = None, **said: Any) -> bytes:
    choice = {"index": 0, "delta": said, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def call(**function: Any) -> bytes:
    return event(tool_calls=[{"index": 0, "id": "1", "function": {"name": "f", **function}}])


END = event("stop") + b"data: [DONE]\n\n"
ANSWER = SSE + b"\r\n" + event(content="Yes") + END


def repeated(piece: bytes, size: int) -> Iterator[bytes]:
    many = piece * max(1, PIECE // len(piece))
    for _ in range(max(1, size // len(many))):
        yield many


def streamed(*pieces: bytes, first: bytes = b"", ends: bool = True) -> Stream:
    """Sends `first`, then one of the pieces after the other, again and again."""

    def stream(size: int) -> Iterator[bytes]:
        yield SSE + b"\r\n" + first
        for piece in pieces:
            yield from repeated(piece, size // len(pieces))
        if ends:
            yield END

    return stream


def numbered(make: Callable[[int], bytes]) -> Stream:
    """Sends events that differ by their numbers."""

    def stream(size: int) -> Iterator[bytes]:
        yield SSE + b"\r\n"
        number = 0
        while size > 0:
            yield (piece := make(number))
            size, number = size - len(piece), number + 1
        yield END

    return stream


def one(make: Callable[[int], bytes]) -> Stream:
    """Sends one large event."""

    def stream(size: int) -> Iterator[bytes]:
        yield SSE + b"\r\n" + make(size) + END

    return stream


def bytes_alone(size: int) -> Iterator[bytes]:
    yield SSE + b"transfer-encoding: chunked\r\n\r\n"
    yield from repeated(b"".join(b"1\r\n%c\r\n" % byte for byte in event(content="x ")), size)


def headers(size: int) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    yield from repeated(b"a: b\r\n", size)


def items(size: int) -> Iterator[bytes]:
    yield SSE.replace(b"text/event-stream", b"application/json") + b"\r\n["
    yield from repeated(b"[],", size)
    yield b"[]]"


def keys(number: int, value: Any) -> dict[str, Any]:
    return {f"k{number}_{n}": value for n in range(2000)}


ATTACKS: dict[str, Stream] = {
    "pieces of arguments after a long one": lambda size: streamed(
        call(arguments="}"), first=call(arguments='{"a":"' + "x" * (size // 2))
    )(size // 2),
    "arguments as objects": numbered(lambda n: call(arguments=keys(n, []))),
    "extra content": numbered(
        lambda n: event(
            tool_calls=[{"index": 0, "extra_content": keys(n, 1), "function": {"name": "f"}}]
        )
    ),
    "details before a call": lambda size: streamed(
        call(arguments="{}"),
        first=b"".join(
            event(reasoning_details=[{"type": f"{n}.{m}"} for m in range(2000)])
            for n in range(size // 50_000)
        ),
    )(1000),
    "details of ever new types": numbered(
        lambda n: event(reasoning_details=[{"type": f"{n}.{m}"} for m in range(2000)])
    ),
    "an event of lists": one(lambda size: b"data: [" + b"[]," * (size // 3) + b"[]]\n\n"),
    "a body of lists": items,
    "an event of numbers": one(lambda size: b"data: [" + b"0," * (size // 2) + b"0]\n\n"),
    "an event of values": one(lambda size: b"data: " + b'{"choices":[]}' * (size // 14) + b"\n\n"),
    "chunks of one byte": bytes_alone,
    "comments": streamed(b": c\n"),
    "empty lines": streamed(b"\n"),
    "returns": streamed(b"\r"),
    "events of nothing": streamed(b"data:{}\n\n"),
    "a field in itself": one(lambda size: b"data:" * (size // 5) + b"\n\n"),
    "other responses before it": lambda size: repeated(b"HTTP/1.1 103 E\r\n\r\n", size),
    "headers": headers,
    "a long finish reason": one(lambda size: event("max_" * (size // 4), content="x")),
    "a text of brackets": one(lambda size: event(content="<" * (size // 8))),
    "white space": streamed(event(content=" ")),
    "calls in the text": streamed(
        event(content='<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    ),
    "a call of lists in the text": one(
        lambda size: event(
            content='<tool_call>{"name": "f", "arguments": {"a": ['
            + "[]," * (size // 6)
            + "[]]}}</tool_call>"
        )
    ),
    "arguments of lists": one(
        lambda size: call(arguments='{"a": [' + "[]," * (size // 3) + "[]]}")
    ),
    "thoughts that are no text": one(lambda size: event(reasoning_content="`[" * (size // 16))),
    "a name in pieces": streamed(event(tool_calls=[{"index": 0, "function": {"name": "n" * 40}}])),
}


def http_answer(body: str, status: int = 200, kind: str = "application/json") -> bytes:
    """A whole answer of a server that closes its connections."""
    sent = body.encode()
    head = f"HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-type: {kind}\r\n"
    return f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent


def key_of(head: str) -> str | None:
    """The header in which clients send their keys."""
    found = re.search(r"(?i)^authorization: (.+)$", head, re.MULTILINE)
    return found and found[1].strip()


class RawServer:
    """Sends what `stream` yields to each POST, byte by byte. There is nothing to GET."""

    def __init__(self, stream: Callable[[], Iterable[bytes]]) -> None:
        self.stream = stream
        self.sent = 0
        self.asked = Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = self._socket.accept()
                Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError), connection.makefile("rb") as asked:
            head = b"".join(iter(asked.readline, b"\r\n")).decode()
            fields = dict(line.lower().split(":", 1) for line in head.splitlines()[1:])
            body = asked.read(int(fields.get("content-length", "0")))
            for piece in self.reply(head, body):
                connection.sendall(piece)
                self.sent += len(piece)
            connection.shutdown(socket.SHUT_WR)

    def reply(self, head: str, body: bytes) -> Iterable[bytes]:
        if head.startswith("GET"):
            return (b"HTTP/1.1 404 N\r\ncontent-length: 0\r\n\r\n",)
        self.asked.set()
        return self.stream()


class HostileServer(RawServer):
    """Answers the first request as it should, so that what is done once has been done, and then
    sends what `stream` yields."""

    def __init__(self, stream: Callable[[], Iterator[bytes]]) -> None:
        streams = chain([lambda: iter([ANSWER])], repeat(stream))
        super().__init__(lambda: next(streams)())
