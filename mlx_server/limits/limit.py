"""What a limit says of itself."""

from dataclasses import dataclass
from typing import Literal

Unit = Literal[
    "bytes", "seconds", "tokens", "items", "rows", "sockets", "processes", "threads", "characters"
]
Per = Literal[
    "request", "connection", "client", "key", "model", "server", "response", "conversation"
]


@dataclass(frozen=True)
class Limit:
    bounds: str
    """The quantity that can't grow past `value`, as a noun phrase."""
    value: int
    unit: Unit
    per: Per
    beyond: str
    """What happens to the request that would pass it: the status, or what is evicted or closed."""
    setting: str | None = None
    """The key in models.yaml that changes it."""
