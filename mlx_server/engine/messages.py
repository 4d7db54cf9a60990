"""What the server and the engine process say to each other: msgpack frames over one socket.

Down: one command a frame. Up: one frame a step, with everything that happened in it.
A row is one sequence being generated; its number is the server's choice and unique.
"""

import struct
from typing import Literal

import msgspec

from mlx_server.requests import SamplingParams

Stop = Literal["stop", "length"]


class Load(msgspec.Struct, tag=True):
    model: str
    path: str


class Generate(msgspec.Struct, tag=True):
    row: int
    model: str
    prompt: list[int]
    max_tokens: int
    """0: only to be scored."""
    stop_tokens: list[int]
    sampling: SamplingParams
    score: bool = False
    """Report the log probabilities of the prompt's own tokens first."""


class Cancel(msgspec.Struct, tag=True):
    rows: list[int]


Command = Load | Generate | Cancel


class Ready(msgspec.Struct, tag=True):
    pid: int
    device: str


class Loading(msgspec.Struct, tag=True):
    model: str
    done: int
    total: int
    """Bytes."""


class Loaded(msgspec.Struct, tag=True):
    model: str
    vocabulary: int
    """Width of the output head: the largest token id it can produce, plus one."""
    nbytes: int


class LoadFailed(msgspec.Struct, tag=True):
    model: str
    message: str


class Admitted(msgspec.Struct, tag=True):
    row: int
    cached_tokens: int


class Logprobs(msgspec.Struct, array_like=True):
    chosen: float | None
    top: list[tuple[int, float]]


class Token(msgspec.Struct, array_like=True):
    """One row's share of a step."""

    row: int
    id: int
    finish: Stop | None = None
    """Set with the row's last token; a stop token itself comes with "stop"."""
    logprobs: Logprobs | None = None


class Scored(msgspec.Struct, tag=True):
    row: int
    logprobs: list[Logprobs]
    """Of each prompt token but the first, which follows nothing."""


class Stepped(msgspec.Struct, tag=True):
    tokens: list[Token]
    waiting: int
    """Rows that have no token yet."""
    active_bytes: int


class RowFailed(msgspec.Struct, tag=True):
    row: int
    message: str


Report = Ready | Loading | Loaded | LoadFailed | Admitted | Scored | Stepped | RowFailed

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size

encode_command = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
encode_reports = msgspec.msgpack.Encoder().encode
decode_reports = msgspec.msgpack.Decoder(list[Report]).decode


def frame(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload)) + payload


def length(header: bytes) -> int:
    (size,) = _HEADER.unpack(header)
    return int(size)
