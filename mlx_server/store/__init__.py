"""The SQLite store of responses, conversations and chat completions, with their items."""

from mlx_server.store.completions import CompletionFilter
from mlx_server.store.conversations import items_too_large
from mlx_server.store.records import (
    RUNNING,
    CompletionRecord,
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
    "CompletionFilter",
    "CompletionRecord",
    "ConversationRecord",
    "ItemRecord",
    "Page",
    "ResponseRecord",
    "Retention",
    "Stats",
    "Store",
    "items_too_large",
]
