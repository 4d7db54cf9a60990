"""The SQLite store of responses, conversations and chat completions, with their items."""

from mlx_server.store.records import (
    RUNNING,
    BatchKind,
    ItemRecord,
    JobKind,
    Kind,
    Page,
    Record,
    Retention,
    RunNews,
    Stats,
)
from mlx_server.store.store import ALL, RecordFilter, Store, items_too_large

__all__ = [
    "ALL",
    "RUNNING",
    "BatchKind",
    "ItemRecord",
    "JobKind",
    "Kind",
    "Page",
    "Record",
    "RecordFilter",
    "Retention",
    "RunNews",
    "Stats",
    "Store",
    "items_too_large",
]
