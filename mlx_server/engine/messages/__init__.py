"""The messages between the server and the engine process: msgpack frames over one socket.

A row is one sequence being generated; the server chooses its number, which is unique.
"""

import struct

import msgspec

from mlx_server.engine.messages.commands import *
from mlx_server.engine.messages.commands import Command
from mlx_server.engine.messages.reports import *
from mlx_server.engine.messages.reports import Report

FLUSH_SECONDS = 3.0
"""How long the engine may write prompts to disk before it drops them or ends, if no row runs."""

SHORTEST_STORED = 16
"""The fewest tokens of a prefix in the prompt cache: a shorter one costs more to keep than to
compute."""

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size

encode_command = encode_commands = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
encode_reports = msgspec.msgpack.Encoder().encode
decode_reports = msgspec.msgpack.Decoder(list[Report]).decode


def frame(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload)) + payload


def length(header: bytes) -> int:
    (size,) = _HEADER.unpack(header)
    return int(size)
