"""What outlives a request: responses, what went into them, and conversations, in SQLite."""

from mlx_server.store.items import too_much
from mlx_server.store.records import (
    RUNNING,
    Conversation,
    Item,
    Page,
    Response,
    Retention,
    Stats,
)
from mlx_server.store.store import Store

__all__ = [
    "RUNNING",
    "Conversation",
    "Item",
    "Page",
    "Response",
    "Retention",
    "Stats",
    "Store",
    "too_much",
]
