"""The server's end of the process that reads PDF files, and the messages between the two."""

from pathlib import Path

import msgspec

from mlx_server import limits
from mlx_server.errors import PdfUnavailable
from mlx_server.sandbox.parent import FileRefused, Program, WarmProcesses


class ReadPdf(msgspec.Struct, frozen=True):
    data: bytes
    pages: int
    characters: int
    seconds: float


class PdfText(msgspec.Struct, frozen=True, tag=True):
    pages: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    why: str
    """A sentence's end, such as "is encrypted"."""


Reply = PdfText | Refused


CHILD = str(Path(__file__).with_name("pdf_child.py"))
"""This file is not imported here, because the reader stays out of the server process."""

PROCESSES = WarmProcesses(
    Program(
        CHILD,
        "reads PDF files",
        memory=limits.PDF_MEMORY,
        largest=4 * limits.PDF_CHARACTERS,
        unavailable=PdfUnavailable,
    ),
    limits.PDF_PROCESSES,
    limits.IDLE_PDF_PROCESSES,
    limits.CLIENT_PDF_PROCESSES,
)

_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def text_of(data: bytes) -> str:
    """The text of all pages. Raises FileRefused, and PdfUnavailable."""
    seconds = limits.PDF_SECONDS
    request = ReadPdf(data, limits.PDF_PAGES, limits.PDF_CHARACTERS, seconds)
    answer, text = PROCESSES.read(request, seconds)
    reply = _replies.decode(answer)
    if isinstance(reply, Refused):
        raise FileRefused(reply.why)
    return text.decode()
