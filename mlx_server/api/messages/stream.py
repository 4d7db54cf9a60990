"""The frames of a stream as Anthropic sends them."""

from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from mlx_server.api.messages.errors import error_body
from mlx_server.api.messages.output import PING
from mlx_server.api.sse import Frames, event
from mlx_server.errors import ServerError


def frames(scope: Scope) -> Frames:
    def error_frame(error: ServerError) -> Mapping[str, Any]:
        return error_body(error, scope)

    return Frames(keep_alive=event(PING), end=b"", error=error_frame)
