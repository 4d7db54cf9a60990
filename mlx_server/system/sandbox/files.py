"""Reads clients' files, PDF files and pictures, in processes with limits: both ends of these."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import structs

from mlx_server import limits
from mlx_server.errors import PdfUnavailable, PicturesUnavailable
from mlx_server.system.sandbox.child import run, time_limit
from mlx_server.system.sandbox.parent import Program, Stopped, WarmProcess, WarmProcesses
from mlx_server.system.sandbox.picture_recipes import PictureRecipe, Size

MOST_ASPECT = 200
"""How many times as long as the other one a side may be; Qwen's models refuse more."""


class ReadPdf(msgspec.Struct, frozen=True):
    data: bytes
    pages: int
    characters: int
    seconds: float


class ReadPicture(msgspec.Struct, frozen=True):
    data: bytes
    recipe: PictureRecipe
    filter: int
    """How it is resized: a number of Pillow's."""
    pixels: int
    """The most pixels of the file."""
    seconds: float


class ProcessPicture(msgspec.Struct, frozen=True):
    """pixels: none for the processor itself, which is made before any picture comes."""

    folder: bytes
    """The checkpoint's path, as the system has it."""
    stamp: bytes
    """Of its files."""
    size: Size
    pixels: bytes
    seconds: float


class FileReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Its payload is the text of a PDF file, or the pixels of a picture's views, three bytes
    each."""

    sizes: list[Size] = []
    """Those of a picture's views."""
    ids: list[int] = []
    """A picture's tokens, if a borrowed processor makes them; the payload is a safetensors file."""
    refusal: str = ""
    """Why the file is not read: a sentence's end, such as "is encrypted"."""


class FileRefused(Exception):
    """A file can't be read. The message is a sentence's end, such as "is encrypted"."""


PDF_PROCESSES = WarmProcesses(
    Program(
        # not imported here, because the reader stays out of the server process
        str(Path(__file__).with_name("pdf_child.py")),
        "reads PDF files",
        memory=limits.PDF_MEMORY,
        largest=4 * limits.PDF_CHARACTERS,
        unavailable=PdfUnavailable,
    ),
    limits.PDF_PROCESSES,
    limits.IDLE_PDF_PROCESSES,
    limits.CLIENT_PDF_PROCESSES,
)

PICTURE_PROCESSES = WarmProcesses(
    Program(
        str(Path(__file__).with_name("picture_child.py")),
        "decodes pictures",
        memory=limits.PICTURE_MEMORY,
        largest=4 * limits.PICTURE_PIXELS,
        unavailable=PicturesUnavailable,
    ),
    limits.PICTURE_PROCESSES,
    limits.IDLE_PICTURE_PROCESSES,
    limits.CLIENT_PICTURE_PROCESSES,
)

PROCESSOR_PROCESSES = WarmProcesses(
    Program(
        str(Path(__file__).parents[2] / "worker" / "picture_processor.py"),
        "runs processors of pictures",
        memory=limits.PROCESSOR_MEMORY,
        largest=limits.PROCESSED_BYTES,
        unavailable=PicturesUnavailable,
    ),
    1,
    1,
)

_replies = msgspec.msgpack.Decoder(FileReply)


def pdf_text(data: bytes) -> str:
    """The text of all pages. Raises FileRefused, and PdfUnavailable."""
    request = ReadPdf(data, limits.PDF_PAGES, limits.PDF_CHARACTERS, limits.PDF_SECONDS)
    _, text = _read(PDF_PROCESSES, request)
    return text.decode()


def decoded(data: bytes, recipe: PictureRecipe, filter: int) -> tuple[list[Size], bytes]:
    """The sizes and the pixels of a picture's views for a model. Raises FileRefused, and
    PicturesUnavailable."""
    request = ReadPicture(data, recipe, filter, limits.PICTURE_PIXELS, limits.PICTURE_SECONDS)
    reply, pixels = _read(PICTURE_PROCESSES, request)
    return reply.sizes, bytes(pixels)


def processed(folder: Path, stamp: bytes, size: Size, pixels: bytes) -> tuple[FileReply, bytes]:
    """What mlx-vlm's processor for a checkpoint makes of a picture. Raises FileRefused, and
    PicturesUnavailable."""
    making = ProcessPicture(os.fsencode(folder), stamp, size, b"", limits.PROCESSOR_SECONDS)
    asked = structs.replace(making, pixels=pixels, seconds=limits.PICTURE_SECONDS)
    with PROCESSOR_PROCESSES.one() as own:
        _asked(own, making)
        reply, inputs = _asked(own, asked)
    return reply, bytes(inputs)


def _read(processes: WarmProcesses, request: ReadPdf | ReadPicture) -> tuple[FileReply, bytearray]:
    with processes.one() as own:
        return _asked(own, request)


def _asked(
    own: WarmProcess, request: ReadPdf | ReadPicture | ProcessPicture
) -> tuple[FileReply, bytearray]:
    try:
        answer, payload = own.ask(bytearray(msgspec.msgpack.encode(request)), request.seconds)
    except Stopped as stopped:
        raise FileRefused(f"can't be read: its reader {stopped}") from None
    reply = _replies.decode(answer)
    if reply.refusal:
        raise FileRefused(reply.refusal)
    return reply, payload


R = TypeVar("R", ReadPdf, ReadPicture, ProcessPicture)


def run_reader(
    kind: type[R], read: Callable[[R], tuple[FileReply, bytes]], warm: Callable[[], None]
) -> None:
    """The program of a child. read: raises FileRefused, and any other error of a damaged file."""
    decoder = msgspec.msgpack.Decoder(kind)
    run(warm, lambda frame: read_safely(read, decoder.decode(frame)))


def read_safely(
    read: Callable[[R], tuple[FileReply, bytes]], request: R
) -> tuple[FileReply, bytes]:
    try:
        with time_limit(request.seconds):
            return read(request)
    except MemoryError:
        raise  # the process ends, and the server says so
    except FileRefused as refused:
        return FileReply(refusal=str(refused)), b""
    except Exception as error:
        return FileReply(refusal=f"is damaged ({type(error).__name__})"), b""
