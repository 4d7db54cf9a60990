"""What outlives a request: responses, what went into them, and conversations, in SQLite."""

from mlx_server.store.items import too_much
from mlx_server.store.records import (
    RUNNING,
    ConversationRecord,
    ItemRecord,
    Page,
    ResponseRecord,
    Retention,
    Stats,
)
from mlx_server.store.store import Store

__all__ = [
    "RUNNING",
    "ConversationRecord",
    "ItemRecord",
    "Page",
    "ResponseRecord",
    "Retention",
    "Stats",
    "Store",
    "too_much",
]
