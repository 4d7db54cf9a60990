"""The content of messages on the wire: its parts, media and files.

Clients send the parts of any API again that they have once had. One that is not text is a medium, a
file, a thought, or has no effect and is reported: a history is not refused for it.
"""

import base64
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from email.message import Message
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from mlx_server import limits
from mlx_server.api.fields import REPORTED_ELSEWHERE, Items, Text, WireModel, as_text, type_of
from mlx_server.messages import NOT_TEXT, ContentPart, Media, MediaKind
from mlx_server.system.sandbox import files
from mlx_server.system.sandbox.files import FileRefused

PASSED_ON = re.compile(r"(?:data|https?):", re.IGNORECASE)
"""The URLs that another server may be given: no files of its own."""
URL_CHARACTERS, TYPE_CHARACTERS = 200, 64

SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)


@dataclass(frozen=True, slots=True)
class GivenFile:
    """An uploaded file that the request names."""

    name: str
    media_type: str
    data: str
    """In base64."""

    @property
    def url(self) -> str:
        """As a data URL; of an unknown type it is base64 alone."""
        known = "" if self.media_type == UNKNOWN_TYPE else self.media_type
        known = known or _signed(self.data)
        return f"data:{known};base64,{self.data}" if known else self.data


UNKNOWN_TYPE = "application/octet-stream"

given_files: ContextVar[Mapping[str, GivenFile]] = ContextVar("given_files", default={})  # noqa: B039
"""Those of the present request, by their ids; and the pictures that were fetched, by their URLs."""

missing_pictures: ContextVar[Mapping[str, str]] = ContextVar("missing_pictures", default={})  # noqa: B039
"""By URL, why pictures of the present request could not be fetched."""


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
    file = given_files.get().get(str(inner.get("file_id") or part.get("file_id")))
    url = file.url if file else inner.get("url")
    return of_url(kind, url, place, detail if isinstance(detail, str) else None)


def of_url(kind: MediaKind, url: object, place: str, detail: str | None = None) -> Media:
    if not isinstance(url, str):
        return Media(kind, place)
    if fetched := given_files.get().get(url):
        url = fetched.url
    name, field = f"{kind}_url", {"url": url} if detail is None else {"url": url, "detail": detail}
    part = {"type": name, name: field} if PASSED_ON.match(url) else None
    head, _, data = url.partition(",")
    if head[:5].lower() == "data:":
        media_type = " ".join(head[5:].partition(";")[0].split())[:TYPE_CHARACTERS]
        return Media(kind, place, media_type or _signed(data), part)
    why = missing_pictures.get().get(url, NOT_TEXT)
    return Media(kind, place, url[:URL_CHARACTERS] if part else "", part, why)


def of_data(kind: MediaKind, data: str, media_type: str, place: str) -> Media:
    """The medium of base64 whose type may be unknown, or be the name of a format."""
    if data[:5] == "data:":
        return of_url(kind, data, place)
    if kind == "audio":
        named = {"data": data, "format": media_type.rpartition("/")[2]}
        known = media_type[:TYPE_CHARACTERS]
        return Media(kind, place, known, {"type": "input_audio", "input_audio": named})
    media_type = media_type or _signed(data) or f"{kind}/*"
    return of_url(kind, f"data:{media_type};base64,{data}", place)


def _signed(data: str) -> str:
    """The media type that the first bytes of base64 tell; empty if it is unknown."""
    try:
        head = base64.b64decode(data[:16])
    except ValueError:
        return ""
    return next((kind for signature, kind in SIGNATURES if head.startswith(signature)), "")


DATA_URL = re.compile(r"data:([^,]{0,200}?)(;base64)?,(.*)", re.DOTALL)
TEXTUAL = re.compile(
    r"text/.*|application/(?:.*\+)?(?:json|jsonl|ndjson|xml|yaml|x-yaml|toml|javascript|sql)"
)
"""Media types whose content is text."""

PDF, PDF_MARK = "application/pdf", b"%PDF-"

ENCODINGS = {
    "utf-8": "utf-8",
    "utf8": "utf-8",
    "us-ascii": "ascii",
    "iso-8859-1": "latin-1",
    "windows-1252": "cp1252",
    "utf-16": "utf-16",
}
"""The encodings that a file may name. Python has more, but some of them take time quadratic in the
length of the text."""


NO_DATA = "no file of this id is stored, and none is fetched by URL"
NO_BASE64 = "its data is not base64"


class UnreadableFile(Exception):
    """The file has no text that can be read; the message says why."""


class FileData(WireModel):
    filename: Text = None
    file_data: Text = None
    """A data URL, or the file in base64."""
    file_id: Text = None
    file_url: Text = None


def content_of_file(file: FileData, place: str) -> ContentPart:
    """The file's name and its text; a picture or a sound is a medium of its own kind."""
    stored = given_files.get().get(file.file_id or "")
    if file.file_data is None and stored:
        return content_of_data(stored.url, place, file.filename or stored.name)
    if file.file_data is None:
        where = " ".join(filter(None, (file.filename, file.file_url, file.file_id)))
        return Media("file", place, where[:URL_CHARACTERS], why=NO_DATA)
    return content_of_data(file.file_data, place, file.filename)


def content_of_data(encoded: str, place: str, name: str | None = None) -> ContentPart:
    """The text of a data URL, or of base64 alone, which is text or a PDF file."""
    media_type = re.split("[;,]", encoded[5:200])[0] if encoded[:5] == "data:" else ""
    kind = kind_of(media_type.partition("/")[0])
    if kind:
        return of_url(kind, encoded, place)
    try:
        text = text_of_data(encoded)
    except UnreadableFile as refused:
        known = " ".join(filter(None, (name, media_type)))
        return Media("file", place, known[:URL_CHARACTERS], why=str(refused))
    return f"{name}\n{text}" if name else text


def text_of_data(encoded: str) -> str:
    parts = DATA_URL.fullmatch(encoded)
    if parts is None:
        data = _from_base64(encoded)
        return pdf_text(data) if data.startswith(PDF_MARK) else _decoded(data, "utf-8")
    if not parts[2]:
        raise UnreadableFile(NO_BASE64)
    header = Message()
    header["content-type"] = parts[1] or "text/plain"
    kind = header.get_content_type()
    if kind == PDF:
        return pdf_text(_from_base64(parts[3]))
    if not TEXTUAL.fullmatch(kind):
        raise UnreadableFile("it is neither text nor PDF")
    charset = str(header.get_param("charset", "utf-8")).lower()
    return _decoded(_from_base64(parts[3]), charset)


def pdf_text(data: bytes) -> str:
    try:
        return files.pdf_text(data)
    except FileRefused as refused:
        raise UnreadableFile(f"the PDF file {refused}") from None


def _from_base64(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:
        raise UnreadableFile(NO_BASE64) from None


def _decoded(data: bytes, charset: str) -> str:
    try:
        return data.decode(ENCODINGS[charset]).removeprefix("\ufeff")
    except (ValueError, KeyError):  # of the text, of the name of its encoding
        raise UnreadableFile("it is not text in its encoding, nor a PDF file") from None


INDEX = re.compile(r"\[\d+\]")


TEXT_FIELDS = (
    *("text", "thinking", "summary", "reasoning", "content", "think", "thought", "parts", "value"),
    *("output_text", "reasoning_content", "reasoning_text"),
)
"""Fields of a content part, or of a reasoning detail, that may have its text."""

NESTING_LEVELS = 8
"""The number of levels of nested parts in which a text is searched."""


def part_text(part: Mapping[str, Any], depth: int = 0) -> str:
    """The text of a part or, if it has parts itself, of those; empty if it has none."""
    for name in TEXT_FIELDS if depth < NESTING_LEVELS else ():
        match part.get(name):
            case str(text) if text:
                return text
            case Mapping() as inner if within := part_text(inner, depth + 1):
                return within
            case [*items]:
                return "".join(
                    item if isinstance(item, str) else part_text(item, depth + 1)
                    for item in items
                    if isinstance(item, str | Mapping)
                )
    return ""


class TextPart(WireModel):
    ACCEPTED = frozenset({"annotations", "citations", "logprobs"})

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: Text = None


class RefusalPart(WireModel):
    type: Literal["refusal"]
    refusal: Text = None


class InputFilePart(FileData):
    """A file as `/v1/responses` has it."""

    type: Literal["input_file"]


class FilePart(WireModel):
    """A file as `/v1/chat/completions` has it."""

    type: Literal["file"]
    file: FileData | None = None


class MediaPart(WireModel):
    """An image, a sound or a video, in any form."""

    type: str

    def ignored_as(self) -> str:
        return REPORTED_ELSEWHERE


class OtherPart(WireModel):
    """A part of another API, such as a call, or a thought that only its maker can read."""

    type: str

    @property
    def text(self) -> str:
        return part_text(self.model_extra or {})

    def ignored_as(self) -> str:
        return REPORTED_ELSEWHERE if self.text else self.type


class ThoughtPart(OtherPart):
    """Reasoning, as Anthropic's and Mistral's APIs have it among the parts of an answer."""


KnownPart = Annotated[
    TextPart | RefusalPart | InputFilePart | FilePart, Field(discriminator="type")
]
THOUGHTS = ("thinking", "reasoning", "thought")


def types_in(union: Any) -> frozenset[str]:
    """The values that `type` has in the members of an annotated union."""
    types = (member.__annotations__["type"] for member in get_args(get_args(union)[0]))
    return frozenset(name for literal in types for name in get_args(literal))


def foreign_to(known: Any) -> Discriminator:
    """For parts of types that a union does not know. One of a known type is wrong, or it would not
    come here, and gets no tag. Tags are no field names, so that errors show only field names."""
    types = types_in(known)

    def tag(value: Any) -> str:
        kind = type_of(value)
        if not isinstance(kind, str) or kind in types:
            return ""
        if kind in THOUGHTS:
            return "<thought>"
        return "<media>" if kind_of(kind) else "<other>"

    return Discriminator(tag)


ForeignPart = (
    Annotated[ThoughtPart, Tag("<thought>")]
    | Annotated[MediaPart, Tag("<media>")]
    | Annotated[OtherPart, Tag("<other>")]
)
Part = Annotated[
    KnownPart | Annotated[ForeignPart, foreign_to(KnownPart)], Field(union_mode="left_to_right")
]
"""Known parts come first, for which no Python is called."""


def medium_of(part: MediaPart, where: str) -> Media:
    return of_part(kind_of(part.type) or "file", part.model_extra or {}, path_to(where, part.type))


def as_parts(value: Any) -> Any:
    """A part may come without a list around it. What has no type is a text, as any JSON may be that
    a tool returned."""
    if isinstance(value, dict) and ("type" in value or "text" in value):
        value = [value]
    if not isinstance(value, list):
        return as_text(value)
    if all(_is_typed(part) for part in value):
        return value
    return [part if _is_typed(part) else _as_part(part) for part in value]


def _is_typed(part: Any) -> bool:
    return isinstance(type_of(part), str)


def _as_part(value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and "text" in value:
        return {**value, "type": "text"}
    return {"type": "text", "text": as_text(value)}


Content = Annotated[str | Items[Part], BeforeValidator(as_parts)]


def parts_of(content: Content | None, where: str) -> tuple[ContentPart, ...]:
    """The texts and media of a content, without thoughts."""
    if content is None or isinstance(content, str):
        return (content,) if content else ()
    return tuple(_content_part(part, where) for part in content if not _is_unread(part))


def thoughts_of(content: Content | None) -> list[str]:
    parts = [] if content is None or isinstance(content, str) else content
    return [part.text for part in parts if isinstance(part, ThoughtPart) and part.text]


def unused_thoughts(content: Content | None) -> Iterator[str]:
    """The names of the thoughts in a message that is not the assistant's."""
    parts = [] if content is None or isinstance(content, str) else content
    return (f"content.{part.type}" for part in parts if isinstance(part, ThoughtPart))


def path_to(where: str, kind: str) -> str:
    """The path of a part by which it is reported: without the numbers of list items."""
    return f"{INDEX.sub('', where)}.{kind[: limits.IGNORED_NAME_CHARACTERS]}"


def _is_unread(part: Part) -> bool:
    return isinstance(part, ThoughtPart) or (isinstance(part, OtherPart) and not part.text)


def _content_part(part: Part, where: str) -> ContentPart:
    match part:
        case TextPart() | OtherPart():
            return part.text or ""
        case RefusalPart():
            return part.refusal or ""
    place = path_to(where, part.type)
    match part:
        case MediaPart():
            return medium_of(part, where)
        case InputFilePart():
            return content_of_file(part, place)
    return content_of_file(part.file or FileData(), place)
