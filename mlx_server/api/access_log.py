"""One log line a request: what was asked, how it ended, how long it took; never what was said."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("mlx_server.access")


class AccessLog:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 0
        gone = complete = False

        async def heard() -> Message:
            nonlocal gone
            message = await receive()
            # with an answer that is complete, every client leaves
            gone = gone or (message["type"] == "http.disconnect" and not complete)
            return message

        async def noted(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, heard, noted)
        finally:
            log.info(
                "%s %s %s %.3fs %s",
                scope["method"],
                ascii(scope["path"])[1:-1][:200],
                "gone" if gone else status or 500,
                time.perf_counter() - began,
                scope.get("state", {}).get("request_id", "-"),
            )
