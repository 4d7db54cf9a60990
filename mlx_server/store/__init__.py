"""The SQLite store of responses, their input items, and conversations."""

from mlx_server.store.completions import CompletionFilter
from mlx_server.store.items import too_much
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
    "too_much",
]
