"""Images, sounds and videos of a message, as the wire has them: what is known of each is read from
its first bytes."""

import re
from base64 import b64decode as decode
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_server.messages import Media, MediaKind

HEAD_BYTES = 256 << 10
"""How much of a picture is decoded to find its size, which JPEG has after its other segments."""

PASSED_ON = re.compile(r"(?:data|https?):", re.IGNORECASE)
"""The URLs that another server may be given: no files of its own."""
URL_CHARACTERS, TYPE_CHARACTERS = 200, 64

SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)
SEGMENTS = 1000
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's markers of segments that begin with the size."""


def kind_of(name: str) -> MediaKind | None:
    """The kind of a part or of a media type, by its name."""
    named: dict[str, MediaKind] = {
        "image": "image",
        "screenshot": "image",
        "audio": "audio",
        "video": "video",
        "file": "file",
        "document": "file",
    }
    return next((kind for word, kind in named.items() if word in name.lower()), None)


def of_part(kind: MediaKind, part: Mapping[str, Any], place: str) -> Media:
    """The medium of a part in any API's form: a URL or data, in the part or in an object of it."""
    named = (part[name] for name in part if name != "type" and kind in name)
    source = next(named, None) or part.get("source") or part
    inner = source if isinstance(source, Mapping) else {"url": source}
    if isinstance(data := inner.get("data"), str):
        types = (inner.get(name) for name in ("media_type", "mimeType", "format"))
        return of_data(
            kind, data, next((each for each in types if isinstance(each, str)), ""), place
        )
    detail = inner.get("detail") or part.get("detail")
    return of_url(kind, inner.get("url"), place, detail if isinstance(detail, str) else None)


def of_url(kind: MediaKind, url: object, place: str, detail: str | None = None) -> Media:
    if not isinstance(url, str):
        return Media(kind, place)
    name, given = f"{kind}_url", {"url": url} if detail is None else {"url": url, "detail": detail}
    part = {"type": name, name: given} if PASSED_ON.match(url) else None
    head, _, data = url.partition(",")
    if head[:5].lower() == "data:":
        return Media(kind, place, about(head[5:].partition(";")[0], data), part)
    return Media(kind, place, url[:URL_CHARACTERS] if part else "", part)


def of_data(kind: MediaKind, data: str, media_type: str, place: str) -> Media:
    """The medium of base64 whose type may be unknown, or be the name of a format."""
    if data[:5] == "data:":
        return of_url(kind, data, place)
    if kind == "audio":
        named = {"data": data, "format": media_type.rpartition("/")[2]}
        known = media_type[:TYPE_CHARACTERS]
        return Media(kind, place, known, {"type": "input_audio", "input_audio": named})
    given = media_type or _signed(_head(data, 16)) or f"{kind}/*"
    return of_url(kind, f"data:{given};base64,{data}", place)


def about(media_type: str, data: str) -> str:
    """The type and the size, as far as they are known."""
    head = _head(data, HEAD_BYTES)
    media_type = " ".join(media_type.split())[:TYPE_CHARACTERS] or _signed(head)
    try:
        size = picture_size(head)
    except IndexError:
        size = None
    return ", ".join(filter(None, (media_type, size and f"{size[0]}x{size[1]}")))


def picture_size(head: bytes) -> tuple[int, int] | None:
    """The width and height of a PNG, JPEG, GIF or WebP picture that begins so. Raises IndexError if
    the beginning is too short."""
    number = int.from_bytes
    match _signed(head), head[12:16]:
        case "image/png", _:
            return number(_cut(head, 16, 4), "big"), number(_cut(head, 20, 4), "big")
        case "image/gif", _:
            return number(_cut(head, 6, 2), "little"), number(_cut(head, 8, 2), "little")
        case "image/jpeg", _:
            at = next(at for at in _segments(head) if head[at + 1] in FRAMES)
            return number(_cut(head, at + 7, 2), "big"), number(_cut(head, at + 5, 2), "big")
        case "image/webp", b"VP8X":
            wide, high = (number(_cut(head, at, 3), "little") + 1 for at in (24, 27))
            return wide, high
        case "image/webp", b"VP8L":
            bits = number(_cut(head, 21, 4), "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case "image/webp", b"VP8 ":
            wide, high = (number(_cut(head, at, 2), "little") & 0x3FFF for at in (26, 28))
            return wide, high
    return None


def _segments(head: bytes) -> Iterator[int]:
    """The places of the segments of a JPEG file. Raises IndexError at the end."""
    at = 2
    for _ in range(SEGMENTS):
        while head[at + 1] == 0xFF:  # fill bytes
            at += 1
        yield at
        at += 2 + int.from_bytes(_cut(head, at + 2, 2), "big")
    raise IndexError(at)


def _cut(head: bytes, at: int, size: int) -> bytes:
    found = head[at : at + size]
    if len(found) < size:
        raise IndexError(at)
    return found


def _signed(head: bytes) -> str:
    """The media type that the first bytes tell; empty if it is unknown."""
    return next((kind for signature, kind in SIGNATURES if head.startswith(signature)), "")


def _head(data: str, size: int) -> bytes:
    try:
        return decode(data[: size // 3 * 4])
    except ValueError:
        return b""
