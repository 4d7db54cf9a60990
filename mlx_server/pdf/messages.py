"""The messages between the server and the process that reads PDF files."""

import msgspec


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
