"""uvicorn's WebSockets, with three of its ways mended."""

import asyncio
from contextlib import suppress

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mlx_server.api.unread import Unread

CLOSE_SECONDS = 0.5
"""For the last of what was said to leave, once the server wants to go."""


class WebSockets(Unread, WebSocketsSansIOProtocol):
    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "websocket.close" and not await self._is_read():
            # a close frame would wait behind what nobody reads, and keep all that
            self.transport.abort()
            return
        await super().send(message)
        # a refusal completes it as well; else uvicorn logs that there was no answer
        self.handshake_complete = self.handshake_complete or self.close_sent

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not _is_utf8(self.frames):
            self.frames = []  # uvicorn logs it as an error of ours
            self.conn.send_close(1007)
            self.handle_parser_exception()
            return
        super().send_receive_event_to_app()

    async def _is_read(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.writable.wait()
        return self.writable.is_set()


def _is_utf8(frames: list[bytes]) -> bool:
    try:
        b"".join(frames).decode()
    except UnicodeDecodeError:
        return False
    return True
