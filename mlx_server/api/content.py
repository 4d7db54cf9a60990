"""The content of a message on the wire: text, or a list of parts.

Clients send the parts of any API again that they have once had. One that is not text is a medium, a
thought, or has no effect and is reported: a history is not refused for it.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Tag

from mlx_server import limits
from mlx_server.api import media
from mlx_server.api.fields import REPORTED_ELSEWHERE, Items, WireModel
from mlx_server.api.files import FileData, content_of_file
from mlx_server.messages import ContentPart
from mlx_server.upstream.contents import part_text

INDEX = re.compile(r"\[\d+\]")


class TextPart(WireModel):
    ACCEPTED = frozenset({"annotations", "cache_control", "citations", "logprobs"})

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"] = "text"
    text: str | None = None


class RefusalPart(WireModel):
    type: Literal["refusal"]
    refusal: str | None = None


class InputFilePart(FileData):
    """A file as `/v1/responses` has it."""

    type: Literal["input_file"]

    def ignored_as(self) -> str:
        return REPORTED_ELSEWHERE


class FilePart(WireModel):
    """A file as `/v1/chat/completions` has it."""

    type: Literal["file"]
    file: FileData | None = None

    def ignored_as(self) -> str:
        return REPORTED_ELSEWHERE


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


CLASSES = {
    **dict.fromkeys(get_args(TextPart.__annotations__["type"]), TextPart),
    **dict.fromkeys(("thinking", "reasoning", "thought"), ThoughtPart),
    "refusal": RefusalPart,
    "input_file": InputFilePart,
    "file": FilePart,
}


def _kind(value: Any) -> str:
    """A union tag that is no field name, so that errors show only field names."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return "<TextPart>"
    found = CLASSES.get(kind) or (MediaPart if media.kind_of(kind) else OtherPart)
    return f"<{found.__name__}>"


def _as_part(value: Any) -> Any:
    """Texts may be parts by themselves."""
    return {"type": "text", "text": value} if value is None or isinstance(value, str) else value


Part = Annotated[
    Annotated[
        Annotated[TextPart, Tag("<TextPart>")]
        | Annotated[RefusalPart, Tag("<RefusalPart>")]
        | Annotated[InputFilePart, Tag("<InputFilePart>")]
        | Annotated[FilePart, Tag("<FilePart>")]
        | Annotated[MediaPart, Tag("<MediaPart>")]
        | Annotated[ThoughtPart, Tag("<ThoughtPart>")]
        | Annotated[OtherPart, Tag("<OtherPart>")],
        Discriminator(_kind),
    ],
    BeforeValidator(_as_part),
]
Content = str | Items[Part]


def parts_of(content: Content | None, where: str) -> tuple[ContentPart, ...]:
    """The texts and media of a content, without thoughts."""
    if content is None or isinstance(content, str):
        return (content,) if content else ()
    shown = (part for part in content if not _is_unread(part))
    return tuple(_content_part(part, path_to(where, part.type)) for part in shown)


def thoughts_of(content: Content | None) -> list[str]:
    given = [] if content is None or isinstance(content, str) else content
    return [part.text for part in given if isinstance(part, ThoughtPart) and part.text]


def unused_thoughts(content: Content | None) -> Iterator[str]:
    """The names of the thoughts in a message that is not the assistant's."""
    given = [] if content is None or isinstance(content, str) else content
    return (f"content.{part.type}" for part in given if isinstance(part, ThoughtPart))


def path_to(where: str, kind: str) -> str:
    """The path of a part by which it is reported: without the numbers of list items."""
    return f"{INDEX.sub('', where)}.{kind[: limits.IGNORED_NAME_CHARACTERS.value]}"


def _is_unread(part: Part) -> bool:
    return isinstance(part, ThoughtPart) or (isinstance(part, OtherPart) and not part.text)


def _content_part(part: Part, place: str) -> ContentPart:
    match part:
        case MediaPart():
            kind = media.kind_of(part.type)
            return media.of_part(kind or "file", part.model_extra or {}, place)
        case InputFilePart():
            return content_of_file(part, place)
        case FilePart():
            return content_of_file(part.file or FileData(), place)
        case RefusalPart():
            return part.refusal or ""
    return part.text or ""
