"""Logs errors at the start and the end of the app without paths or messages.

Starlette would send the whole traceback as text, with paths and messages, and uvicorn would log it.
"""

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server.errors import ServerError

log = logging.getLogger("mlx_server")

FAILURES = {
    "lifespan.startup.failed": "the server could not start",
    "lifespan.shutdown.failed": "the server could not shut down cleanly",
}


class DiscreetLifespan:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        failure = ""

        async def send_without_text(message: Message) -> None:
            nonlocal failure
            failure = FAILURES.get(message["type"], failure)
            await send({"type": message["type"]})

        try:
            await self._app(scope, receive, send_without_text)
        except Exception as error:
            if isinstance(error, ServerError):
                log.critical("%s: %s", failure, error.message)
            else:
                log.critical("%s", failure, exc_info=error)
            raise
