"""uvicorn's WebSockets, with two of its ways mended."""

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol


class WebSockets(WebSocketsSansIOProtocol):
    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "websocket.close" and not self.writable.is_set():
            # a close frame would wait behind what nobody reads, and keep all that
            self.transport.abort()
            return
        await super().send(message)
        # a refusal completes it as well; else uvicorn logs that there was no answer
        self.handshake_complete = self.handshake_complete or self.close_sent
