"""The server's end of the process that decodes pictures, and the messages between the two."""

import math
from pathlib import Path

import msgspec

from mlx_server import limits
from mlx_server.errors import PicturesUnavailable
from mlx_server.sandbox.parent import FileRefused, Program, WarmProcesses

MOST_ASPECT = 200
"""How many times as long as the other one a side may be; Qwen's models refuse more."""


class Square(msgspec.Struct, frozen=True, tag=True):
    """Each picture is made a square of the same size."""

    side: int

    def size(self, width: int, height: int) -> tuple[int, int]:
        return self.side, self.side


class Grid(msgspec.Struct, frozen=True, tag=True):
    """Each picture keeps its aspect, and its sides become multiples of `cell`."""

    cell: int
    least: int
    """The least number of pixels, as far as multiples allow; so is `most`."""
    most: int

    def size(self, width: int, height: int) -> tuple[int, int]:
        cell = self.cell
        wide, high = round(width / cell) * cell, round(height / cell) * cell
        if wide * high > self.most:
            times = math.sqrt(width * height / self.most)
            wide, high = (max(1, int(side / times / cell)) * cell for side in (width, height))
        elif wide * high < self.least:
            times = math.sqrt(self.least / (width * height))
            wide, high = (math.ceil(side * times / cell) * cell for side in (width, height))
        return wide, high


Fit = Square | Grid
"""The size that a picture has for a model, by the size of its file."""


class ReadPicture(msgspec.Struct, frozen=True):
    data: bytes
    fit: Fit
    filter: int
    """How it is resized: a number of Pillow's."""
    pixels: int
    """The most pixels of the file."""
    seconds: float


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """Its pixels, three bytes each, are the payload of this reply."""

    width: int
    height: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    why: str


Reply = Decoded | Refused

PROCESSES = WarmProcesses(
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

_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decoded(data: bytes, fit: Fit, filter: int) -> tuple[int, int, bytes]:
    """The width, the height and the pixels of a picture in the size for a model. Raises
    FileRefused, and PicturesUnavailable."""
    seconds = limits.PICTURE_SECONDS
    request = ReadPicture(data, fit, filter, limits.PICTURE_PIXELS, seconds)
    answer, pixels = PROCESSES.read(request, seconds)
    reply = _replies.decode(answer)
    if isinstance(reply, Refused):
        raise FileRefused(reply.why)
    return reply.width, reply.height, bytes(pixels)
