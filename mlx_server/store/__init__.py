"""The SQLite store of responses, conversations and chat completions, with their items."""

from mlx_server.store.records import RUNNING, ItemRecord, Page, Record, Retention, RunNews, Stats
from mlx_server.store.store import CompletionFilter, Store, items_too_large

__all__ = [
    "RUNNING",
    "CompletionFilter",
    "ItemRecord",
    "Page",
    "Record",
    "Retention",
    "RunNews",
    "Stats",
    "Store",
    "items_too_large",
]
