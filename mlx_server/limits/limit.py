"""The record of one limit."""

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
    """A noun phrase that names the quantity that can't grow beyond `value`."""
    value: int
    unit: Unit
    per: Per
    beyond: str
    """The effect beyond the limit: the response's status, or what is dropped, closed or left
    out."""
    setting: str | None = None
    """The key in models.yaml that changes the value."""
