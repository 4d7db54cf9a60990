"""Counts the stored bytes of each owner.

Triggers update the count in the transaction of each change, so that no statement can omit it and no
crash can make it wrong.
"""

from sqlite3 import Connection

from mlx_server.errors import StoreFull
from mlx_server.store.records import Retention

ROW_BYTES = 128
"""The bytes of a row in its table and indexes, in addition to its body and its id, which is stored
twice."""

REMEDY = (
    "Delete responses, conversations or chat completions (DELETE /v1/responses/ID, "
    "DELETE /v1/conversations/ID, DELETE /v1/chat/completions/ID), "
    "send `store: false`, or raise `store.bytes` in models.yaml."
)


def _event_cost(row: str) -> str:
    return f"{ROW_BYTES} + length({row}.body)"


def _item_cost(row: str) -> str:
    return f"{_event_cost(row)} + 2 * length(CAST({row}.id AS BLOB))"


def _record_cost(row: str) -> str:
    return f"{_item_cost(row)} + coalesce(length(CAST({row}.labels AS BLOB)), 0)"


def _counts(table: str, change: str, row: str, cost: str) -> str:
    """The SQL of a trigger that counts rows of `table`, which belong to a record and are deleted
    before it."""
    return (
        f"CREATE TRIGGER {table}_{change} AFTER {change} ON {table} BEGIN"  # noqa: S608
        f" UPDATE usage SET bytes = bytes + {cost}"
        f" WHERE owner = (SELECT owner FROM records WHERE seq = {row}.record); END"
    )


SCHEMA = (
    "CREATE TABLE usage (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID",
    f"""CREATE TRIGGER records_insert AFTER INSERT ON records BEGIN
        INSERT INTO usage VALUES (NEW.owner, {_record_cost("NEW")})
            ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes;
    END""",  # noqa: S608
    f"""CREATE TRIGGER records_update AFTER UPDATE OF body, labels ON records BEGIN
        UPDATE usage SET bytes = bytes + ({_record_cost("NEW")}) - ({_record_cost("OLD")})
            WHERE owner = NEW.owner;
    END""",  # noqa: S608
    # rows are deleted before their record, since their triggers find the owner by it
    """CREATE TRIGGER records_empty BEFORE DELETE ON records BEGIN
        DELETE FROM items WHERE record = OLD.seq;
        DELETE FROM events WHERE record = OLD.seq;
    END""",
    f"""CREATE TRIGGER records_delete AFTER DELETE ON records BEGIN
        UPDATE usage SET bytes = bytes - ({_record_cost("OLD")}) WHERE owner = OLD.owner;
        DELETE FROM usage WHERE owner = OLD.owner AND bytes <= 0;
    END""",  # noqa: S608
    _counts("items", "INSERT", "NEW", _item_cost("NEW")),
    _counts("items", "DELETE", "OLD", f"-({_item_cost('OLD')})"),
    _counts("events", "INSERT", "NEW", _event_cost("NEW")),
    _counts("events", "DELETE", "OLD", f"-({_event_cost('OLD')})"),
)


def total_bytes(db: Connection) -> int:
    return int(db.execute("SELECT total(bytes) FROM usage").fetchone()[0])


def check_usage(db: Connection, owner: str, retention: Retention) -> None:
    """Raises StoreFull if a limit is exceeded. It is called at the end of a write, which is then
    rolled back."""
    row = db.execute("SELECT bytes FROM usage WHERE owner = ?", (owner,)).fetchone()
    if row and row[0] > (most := retention.bytes // 2):
        raise StoreFull(f"Your key would have {row[0]} bytes stored; the limit is {most}. {REMEDY}")
    if (stored := total_bytes(db)) > retention.bytes:
        raise StoreFull(
            f"The server would have {stored} bytes stored; the limit is {retention.bytes}. {REMEDY}"
        )
