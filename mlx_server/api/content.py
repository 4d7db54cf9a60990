"""The content of a message on the wire: text, or a list of parts.

Clients send the parts of any API again that they have once had. One that is not text is a medium, a
thought, or has no effect and is reported: a history is not refused for it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from mlx_server import limits
from mlx_server.api import media
from mlx_server.api.fields import REPORTED_ELSEWHERE, Items, Text, WireModel, as_text
from mlx_server.api.files import FileData, content_of_file
from mlx_server.messages import ContentPart

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
            case Mapping() as found if within := part_text(found, depth + 1):
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
KNOWN = frozenset(
    name
    for part in get_args(get_args(KnownPart)[0])
    for name in get_args(part.__annotations__["type"])
)
THOUGHTS = ("thinking", "reasoning", "thought")


def _kind(value: Any) -> str:
    """A union tag that is no field name, so that errors show only field names. One of a known type
    is wrong, or it would not come here."""
    kind: str = value["type"] if isinstance(value, dict) else value.type
    if kind in THOUGHTS:
        return "<thought>"
    return "<media>" if media.kind_of(kind) and kind not in KNOWN else "<other>"


def _refuse_known(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else value.type
    if kind in KNOWN:
        raise ValueError("its fields are wrong")
    return value


ForeignPart = Annotated[
    Annotated[ThoughtPart, Tag("<thought>")]
    | Annotated[MediaPart, Tag("<media>")]
    | Annotated[OtherPart, BeforeValidator(_refuse_known), Tag("<other>")],
    Discriminator(_kind),
]
Part = Annotated[KnownPart | ForeignPart, Field(union_mode="left_to_right")]
"""Known parts come first, for which no Python is called."""


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
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return isinstance(kind, str)


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
    given = [] if content is None or isinstance(content, str) else content
    return [part.text for part in given if isinstance(part, ThoughtPart) and part.text]


def unused_thoughts(content: Content | None) -> Iterator[str]:
    """The names of the thoughts in a message that is not the assistant's."""
    given = [] if content is None or isinstance(content, str) else content
    return (f"content.{part.type}" for part in given if isinstance(part, ThoughtPart))


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
            kind = media.kind_of(part.type)
            return media.of_part(kind or "file", part.model_extra or {}, place)
        case InputFilePart():
            return content_of_file(part, place)
    return content_of_file(part.file or FileData(), place)
