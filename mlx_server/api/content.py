"""The content of a message on the wire: text, or a list of parts."""

from typing import Annotated, Literal

from pydantic import Field

from mlx_server.api.fields import Items, WireModel
from mlx_server.api.files import FileData, file_text
from mlx_server.errors import BadRequest


class TextPart(WireModel):
    ACCEPTED = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class RefusalPart(WireModel):
    type: Literal["refusal"]
    refusal: str


class InputFilePart(FileData):
    """A file as `/v1/responses` has it."""

    type: Literal["input_file"]


class FilePart(WireModel):
    """A file as `/v1/chat/completions` has it."""

    type: Literal["file"]
    file: FileData


class MediaPart(WireModel):
    """Media, which are refused by name: these models read only text."""

    type: Literal[
        "computer_screenshot",
        "image_url",
        "input_audio",
        "input_image",
        "input_video",
    ]


Part = Annotated[
    TextPart | RefusalPart | InputFilePart | FilePart | MediaPart, Field(discriminator="type")
]
Content = str | Items[Part]


def text_of(content: Content | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        match part:
            case MediaPart():
                raise BadRequest(
                    f"Content of type `{part.type}` is not supported: these models read only text.",
                    param=f"{where}[{i}].type",
                )
            case InputFilePart():
                texts.append(file_text(part, f"{where}[{i}]"))
            case FilePart(file=file):
                texts.append(file_text(file, f"{where}[{i}].file"))
            case RefusalPart():
                texts.append(part.refusal)
            case _:
                texts.append(part.text)
    return "\n".join(texts)
