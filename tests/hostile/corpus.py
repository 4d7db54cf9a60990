"""The hostile corpus as it is written in corpus/*.yaml; its language is told in corpus/README.md.

Nothing here knows which server is attacked: `scripts/attack` reads it too.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "corpus"
CHAT = "/v1/chat/completions"
HOST, CLOSE = "Host: localhost", "Connection: close"
JSON, LENGTH = "Content-Type: application/json", "Content-Length: "
MASK = b"\x13\x37\xbe\xef"

Json = dict[str, Any]
Step = int | str
"""A status, or `closes`."""


@dataclass(frozen=True)
class Target:
    """What of a server attacks need to know."""

    model: str
    head: int
    """One more than the largest id that the model can produce."""
    tokens: int
    """One more than the largest that has a text."""


@dataclass(frozen=True)
class Expected:
    steps: tuple[frozenset[Step], ...]
    """One after another, each one of a few."""
    error: Mapping[str, str | None]
    """Of `type`, `code` and `param`, what matters."""

    @classmethod
    def read(cls, line: str | int) -> "Expected":
        words = str(line).split()
        pairs = [word.partition("=") for word in words if "=" in word]
        error = {name: None if value == "null" else value for name, _, value in pairs}
        steps = " ".join(word for word in words if "=" not in word).split(" then ")
        return cls(tuple(each for text in steps for each in _steps(text)), error)


def _steps(text: str) -> list[frozenset[Step]]:
    few, _, times = text.partition("*")
    step = frozenset(int(one) if one.isdecimal() else one for one in few.split("|"))
    return [step] * int(times or 1)


@dataclass(frozen=True)
class Call:
    """A request as a client's library sends it."""

    path: str
    body: Mapping[str, Any] | bytes | None
    raw: dict[str, str] = field(default_factory=dict)
    """Members of the body by their JSON text, in place of others of their names."""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    def content(self) -> bytes:
        if not isinstance(self.body, Mapping):
            return self.body or b""
        # with NaN, and with half a surrogate pair as its escape
        written = {name: json.dumps(value) for name, value in self.body.items()} | self.raw
        members = (f"{json.dumps(name)}: {value}" for name, value in written.items())
        return f"{{{', '.join(members)}}}".encode()


@dataclass(frozen=True)
class Bytes:
    """What goes over a socket."""

    said: bytes
    then: bytes = b""
    """After the first answer."""
    drip: bytes = b""
    """After all, again and again."""


@dataclass(frozen=True)
class Attack:
    category: str
    name: str
    sent: Call | Bytes
    expected: Expected
    everywhere: bool
    """Whether any server of the OpenAI API should refuse it or answer."""

    def __str__(self) -> str:
        return f"{self.category}: {self.name}"


def attacks(target: Target) -> Iterator[Attack]:
    for path in sorted(FOLDER.glob("*.yaml")):
        loader = _loader(target)
        for document in yaml.load_all(path.read_text("utf-8"), loader):
            yield from _listed(path.stem, document)
            yield from _tabled(path.stem, document)


def _listed(category: str, document: Json) -> Iterator[Attack]:
    shared = document.get("each", {})
    for name, own in document.get("attacks", {}).items():
        yield _attack(category, name, document, {**shared, **own})


def _tabled(category: str, document: Json) -> Iterator[Attack]:
    """Every parameter at every value, but for those that the table leaves out."""
    values: Json = document.get("values", {})
    for parameter, row in document.get("parameters", {}).items():
        for (value, text), expected in zip(values.items(), row, strict=True):
            if expected is None:
                continue
            param = f" param={parameter}" if expected == 400 and value != "NaN" else ""
            written = {"raw": {parameter: text}, "expect": f"{expected}{param}"}
            yield _attack(category, f"{parameter} is {value}", document, written)


def _attack(category: str, name: str, document: Json, entry: Json) -> Attack:
    asked = {**document, **entry}
    expected, everywhere = Expected.read(asked["expect"]), bool(asked.get("everywhere", True))
    return Attack(category, name, _sent(asked), expected, everywhere)


def _sent(entry: Json) -> Call | Bytes:
    if "send" in entry:
        return Bytes(*(_joined(entry.get(name, "")) for name in ("send", "then", "drip")))
    body = entry.get("bytes")
    if body is None:
        body = {**entry.get("body", {}), **entry.get("set", {})}
    method = entry.get("method", "POST")
    return Call(
        path=str(entry["to"]),
        body=(body if isinstance(body, dict) else _bytes(body)) if method == "POST" else None,
        raw=entry.get("raw", {}),
        method=method,
        headers={"content-type": "application/json", **entry.get("headers", {})},
    )


def _joined(pieces: Any) -> bytes:
    return _bytes(pieces) if isinstance(pieces, str | bytes) else b"".join(map(_bytes, pieces))


def _bytes(piece: str | bytes) -> bytes:
    return piece if isinstance(piece, bytes) else piece.encode("latin-1")


def _loader(target: Target) -> type[yaml.CSafeLoader]:
    class Loader(yaml.CSafeLoader):
        pass

    def list_of(make: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        return lambda loader, node: make(*loader.construct_sequence(node, deep=True))

    for name, make in CONSTRUCTORS.items():
        Loader.add_constructor(f"!{name}", list_of(make))
    Loader.add_constructor("!hex", lambda loader, node: bytes.fromhex(node.value))
    Loader.add_constructor("!model", lambda loader, node: target.model + node.value)
    Loader.add_constructor("!head", lambda loader, node: target.head + int(node.value))
    Loader.add_constructor("!tokens", lambda loader, node: target.tokens + int(node.value))
    return Loader


def _repeat(piece: Any, times: int) -> Any:
    return piece * times


def _nested(opening: str, core: str, closing: str, depth: int) -> str:
    return opening * depth + core + closing * depth


def _numbered(template: Any, count: int, start: int = 0) -> Any:
    """A `#` in it is the number."""
    numbers = map(str, range(start, start + count))
    if isinstance(template, str):
        return [template.replace("#", number) for number in numbers]
    text = json.dumps(template)
    return [json.loads(text.replace("#", number)) for number in numbers]


def _keyed(template: str, value: Any, count: int, start: int = 0) -> Json:
    return dict.fromkeys(_numbered(template, count, start), value)


def _deep(template: Any, core: Any, depth: int) -> Any:
    """The template's `#` member holds the next one."""
    found = core
    for _ in range(depth):
        found = _with(template, found)
    return found


def _with(template: Any, inner: Any) -> Any:
    if template == "#":
        return inner
    if isinstance(template, dict):
        return {name: _with(value, inner) for name, value in template.items()}
    return [_with(value, inner) for value in template] if isinstance(template, list) else template


def _join(*pieces: Any) -> Any:
    is_text = all(isinstance(piece, str) for piece in pieces)
    return "".join(pieces) if is_text else _joined(pieces)


def _encoded(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


def _request(line: str | bytes, *lines: str | bytes) -> bytes:
    """A head with what `lines` there are and nothing else."""
    return b"".join(_bytes(each) + b"\r\n" for each in (line, *lines)) + b"\r\n"


def _get(path: str | bytes, *lines: str | bytes) -> bytes:
    return _request(_joined(["GET ", path, " HTTP/1.1"]), HOST, CLOSE, *lines)


def _chat(*lines: str | bytes) -> bytes:
    """Its head, but for the length."""
    return _request(f"POST {CHAT} HTTP/1.1", HOST, CLOSE, JSON, *lines)


def posted(body: Any, *lines: str) -> bytes:
    """A whole request to chat, with its true length, on a connection that stays."""
    content = _content(body)
    return (
        _request(f"POST {CHAT} HTTP/1.1", HOST, JSON, f"{LENGTH}{len(content)}", *lines) + content
    )


def _chunked(size: int, body: Any) -> bytes:
    content = _content(body)
    starts = range(0, len(content), size)
    chunks = (content[start : start + size] for start in starts)
    said = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks]
    return b"".join([*said, b"0\r\n\r\n"])


def _content(body: Any) -> bytes:
    return _bytes(body) if isinstance(body, str | bytes) else json.dumps(body).encode()


def _frame(first: int, payload: Any, length: int | None = None) -> bytes:
    """Of a WebSocket, masked; `first` is its first byte, and `length` what it says of itself."""
    content = _content(payload)
    size = len(content) if length is None else length
    if size < 126:
        head = struct.pack("!BB", first, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, 0xFE, size)
    else:
        head = struct.pack("!BBQ", first, 0xFF, size)
    masked = bytes(byte ^ MASK[at % 4] for at, byte in enumerate(content))
    return head + MASK + masked


CONSTRUCTORS: Mapping[str, Callable[..., Any]] = {
    "repeat": _repeat,
    "nested": _nested,
    "numbered": _numbered,
    "keyed": _keyed,
    "deep": _deep,
    "join": _join,
    "encoded": _encoded,
    "request": _request,
    "get": _get,
    "chat": _chat,
    "posted": posted,
    "chunked": _chunked,
    "frame": _frame,
}
