"""The commands that the server sends in one turn of its event loop.

They arrive together, so that the engine takes no step between them."""

import asyncio
from collections.abc import Callable

import msgspec

from mlx_server.engine import messages
from mlx_server.engine.messages import Command


class Outbox:
    def __init__(self, write: Callable[[bytes], None]) -> None:
        """write: called with one frame at the end of a turn in which commands were sent."""
        self._write = write
        self._encoded: list[msgspec.Raw] = []

    def send(self, command: Command) -> None:
        payload = messages.encode_command(command)
        messages.decode_command(payload)  # an unreadable command would end the engine
        if not self._encoded:
            asyncio.get_running_loop().call_soon(self._write_all)
        self._encoded.append(msgspec.Raw(payload))

    def _write_all(self) -> None:
        encoded, self._encoded = self._encoded, []
        self._write(messages.frame(messages.encode_commands(encoded)))
