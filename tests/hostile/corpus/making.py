"""What bodies, heads of requests and frames are made of that are too large to write down."""

import json
import struct
from collections.abc import Sequence
from typing import Any

CHAT = "/v1/chat/completions"
GET, POST = "GET /health HTTP/1.1", f"POST {CHAT} HTTP/1.1"
HOST, CLOSE = "Host: localhost", "Connection: close"
JSON, LENGTH = "Content-Type: application/json", "Content-Length: "
CHUNKED = "Transfer-Encoding: chunked"
MASK = b"\x13\x37\xbe\xef"


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def function(**members: Any) -> dict[str, Any]:
    return {"type": "function", "function": members}


def mcp(url: str, **members: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "a", "server_url": url, **members}


def nested(opening: str, core: str, closing: str, depth: int) -> str:
    return opening * depth + core + closing * depth


def numbered(template: Any, count: int, start: int = 0) -> Any:
    """A list; a `#` in the template is the number."""
    numbers = map(str, range(start, start + count))
    if isinstance(template, str):
        return [template.replace("#", number) for number in numbers]
    text = json.dumps(template)
    return [json.loads(text.replace("#", number)) for number in numbers]


def keyed(template: str, value: Any, count: int, start: int = 0) -> dict[str, Any]:
    """An object of such keys, all with one value."""
    return dict.fromkeys(numbered(template, count, start), value)


def deep(template: Any, core: Any, depth: int) -> Any:
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


def joined(*pieces: str | bytes | Sequence[str | bytes]) -> bytes:
    """Text is Latin-1."""
    found = b""
    for piece in pieces:
        if isinstance(piece, str):
            found += piece.encode("latin-1")
        else:
            found += piece if isinstance(piece, bytes) else joined(*piece)
    return found


def request(line: str | bytes, *lines: str | bytes) -> bytes:
    """A head with these lines and nothing else."""
    return b"".join(joined(each, "\r\n") for each in (line, *lines)) + b"\r\n"


def get(path: str | bytes, *lines: str | bytes) -> bytes:
    """The line closes afterwards."""
    return request(joined("GET ", path, " HTTP/1.1"), HOST, CLOSE, *lines)


def chat_head(*lines: str | bytes) -> bytes:
    """Of a request to chat, but for the length."""
    return request(POST, HOST, CLOSE, JSON, *lines)


def posted(body: Any, *lines: str) -> bytes:
    """A whole request to chat, with its true length, on a connection that stays."""
    content = _content(body)
    return request(POST, HOST, JSON, f"{LENGTH}{len(content)}", *lines) + content


def chunked(size: int, body: Any) -> bytes:
    content = _content(body)
    starts = range(0, len(content), size)
    chunks = (content[start : start + size] for start in starts)
    said = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks]
    return b"".join([*said, b"0\r\n\r\n"])


def _content(body: Any) -> bytes:
    return joined(body) if isinstance(body, str | bytes) else json.dumps(body).encode()


def frame(first: int, payload: Any, length: int | None = None) -> bytes:
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
