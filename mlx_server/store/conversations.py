"""The store's operations on conversations, and the queries of ordered items that all kinds of
records share."""

import sqlite3
from collections.abc import Iterable, Sequence
from itertools import accumulate
from sqlite3 import Connection
from typing import Literal

from mlx_server import limits
from mlx_server.errors import BadRequest, NotFound, TooLarge
from mlx_server.store import usage
from mlx_server.store.database import Database, reads, sized, writes
from mlx_server.store.records import (
    CompletionRecord,
    ConversationRecord,
    ItemRecord,
    Page,
    ResponseRecord,
)

Kind = Literal["response", "conversation", "completion"]
Order = Literal["asc", "desc"]

PAGES = {
    "asc": "SELECT seq, length(body) FROM items WHERE record = ? AND output = 0 AND seq > ?"
    " ORDER BY seq LIMIT ?",
    "desc": "SELECT seq, length(body) FROM items WHERE record = ? AND output = 0 AND seq < ?"
    " ORDER BY seq DESC LIMIT ?",
}
"""The query of one page of items, by order. SQLite gets the `length` of a blob without reading
it."""

ADD_RECORD = (
    "INSERT INTO records"
    " (kind, owner, id, created_at, used_at, status, previous, conversation, labels, body) VALUES"
    " (:kind, :owner, :id, :made, :made, :status, :previous, :conversation, :labels, :body)"
)

BEFORE_ALL = {"asc": 0, "desc": 2**63 - 1}


def find(db: Connection, kind: Kind, id: str, owner: str) -> int:
    """The record's `seq`. Raises NotFound, even for a record of another owner."""
    found = db.execute(
        "SELECT seq FROM records WHERE kind = ? AND id = ? AND owner = ?", (kind, id, owner)
    ).fetchone()
    if found is None:
        raise NotFound(f"{kind.capitalize()} with id '{id}' not found.")
    return int(found[0])


def add(
    db: Connection,
    kind: Kind,
    owner: str,
    record: ResponseRecord | ConversationRecord | CompletionRecord,
    items: Iterable[ItemRecord],
    **columns: str | bytes | None,
) -> int:
    """Stores a record with its input items, and returns its `seq`.

    columns: the `body`, and the columns that only some kinds of records have.
    """
    row = {"status": "", "previous": None, "conversation": None, "labels": None, **columns}
    row |= {"kind": kind, "owner": owner, "id": record.id}
    seq = db.execute(ADD_RECORD, {**row, "made": record.created_at}).lastrowid
    assert seq is not None
    append(db, seq, items, output=False)
    return seq


def drop(db: Connection, kind: Kind, id: str, owner: str) -> None:
    db.execute("DELETE FROM records WHERE seq = ?", (find(db, kind, id, owner),))


def append(db: Connection, record: int, items: Iterable[ItemRecord], *, output: bool) -> None:
    for item in items:
        row = (record, output, item.id, sized(item.body))
        try:
            db.execute("INSERT INTO items (record, output, id, body) VALUES (?, ?, ?, ?)", row)
        except sqlite3.IntegrityError as error:
            raise BadRequest(
                f"An item with id '{item.id}' already exists. Use another id, or leave it out."
            ) from error


def all_of(db: Connection, record: int) -> list[ItemRecord]:
    rows = db.execute("SELECT id, body FROM items WHERE record = ? ORDER BY output, seq", (record,))
    return [ItemRecord(*row) for row in rows]


def output_of(db: Connection, record: int) -> Sequence[ItemRecord]:
    rows = db.execute(
        "SELECT id, body FROM items WHERE record = ? AND output = 1 ORDER BY seq", (record,)
    )
    return tuple(ItemRecord(*row) for row in rows)


def page(db: Connection, record: int, after: str | None, limit: int, order: Order) -> Page:
    start = BEFORE_ALL[order] if after is None else _position(db, record, after)
    rows = db.execute(PAGES[order], (record, start, limit + 1)).fetchall()
    fitting = rows[: fitting_count([size for _, size in rows[:limit]])]
    items = [item_at(db, seq) for seq, _ in fitting]
    return Page(items, has_more=len(rows) > len(fitting))


def fitting_count(sizes: Sequence[int]) -> int:
    """The number of items, from the first on, that fit in a page. It is at least one, so that
    paging never stops."""
    ends = accumulate(sizes)
    return max(1, sum(end <= limits.PAGE_BYTES for end in ends))


def item_at(db: Connection, seq: int) -> ItemRecord:
    return ItemRecord(*db.execute("SELECT id, body FROM items WHERE seq = ?", (seq,)).fetchone())


def size_at(db: Connection, seq: int) -> int:
    found = db.execute("SELECT length(body) FROM items WHERE seq = ?", (seq,)).fetchone()
    return int(found[0])


def check_count(db: Connection, conversation: int, more: int = 0) -> None:
    """Raises BadRequest if the conversation would have too many items after adding `more`."""
    count = db.execute("SELECT count(*) FROM items WHERE record = ?", (conversation,)).fetchone()[0]
    if count + more > (most := limits.CONVERSATION_ITEMS):
        raise BadRequest(
            f"A conversation can have {most} items at most. Delete some, or start another.",
            param="conversation",
        )


class StoredSize:
    """The size of stored items, added up before they are read. Raises TooLarge if it exceeds the
    limits."""

    def __init__(self, param: str, most_bytes: int) -> None:
        self._param, self._most_bytes = param, most_bytes
        self._bytes = self._items = 0

    def add(self, db: Connection, record: int) -> None:
        count, size = db.execute(
            "SELECT count(*), total(length(body)) FROM items WHERE record = ?", (record,)
        ).fetchone()
        self._items += count
        self._bytes += int(size)
        if self._bytes > self._most_bytes:
            raise items_too_large(self._param)
        if self._items > (most := limits.READ_BACK_ITEMS):
            raise TooLarge(
                f"`{self._param}` refers to more than {most} stored items. Start a new "
                "conversation and send the items that still matter in `input`.",
                param=self._param,
            )


def items_too_large(param: str) -> TooLarge:
    return TooLarge(
        f"This request and the stored items that `{param}` refers to are together larger than "
        "`server.max_body_bytes`. Start a new conversation and send the items that still matter "
        "in `input`, or raise the limit in models.yaml.",
        param=param,
    )


def _position(db: Connection, record: int, id: str) -> int:
    found = db.execute(
        "SELECT seq FROM items WHERE record = ? AND output = 0 AND id = ?", (record, id)
    ).fetchone()
    if found is None:
        raise BadRequest(
            f"`after` is '{id}', which is not an item of this list. Use the `last_id` of a page.",
            param="after",
        )
    return int(found[0])


class Conversations(Database):
    @writes
    def create_conversation(
        self,
        db: Connection,
        conversation: ConversationRecord,
        owner: str,
        items: Sequence[ItemRecord] = (),
    ) -> None:
        body = sized(conversation.body)
        add(db, "conversation", owner, conversation, items, body=body)
        usage.check(db, owner, self.retention)

    @reads
    def conversation(self, db: Connection, id: str, owner: str) -> ConversationRecord:
        seq = find(db, "conversation", id, owner)
        row = db.execute("SELECT created_at, body FROM records WHERE seq = ?", (seq,)).fetchone()
        return ConversationRecord(id, *row)

    @writes
    def update_conversation(
        self, db: Connection, id: str, owner: str, body: bytes, now: float
    ) -> None:
        seq = find(db, "conversation", id, owner)
        row = (sized(body), now, seq)
        db.execute("UPDATE records SET body = ?, used_at = ? WHERE seq = ?", row)
        usage.check(db, owner, self.retention)

    @writes
    def delete_conversation(self, db: Connection, id: str, owner: str) -> None:
        """Deletes the conversation. Its responses stay, since they have copies of their items."""
        drop(db, "conversation", id, owner)

    @writes
    def add_items(
        self, db: Connection, id: str, owner: str, items: Sequence[ItemRecord], now: float
    ) -> None:
        seq = find(db, "conversation", id, owner)
        append(db, seq, items, output=False)
        check_count(db, seq)
        db.execute("UPDATE records SET used_at = ? WHERE seq = ?", (now, seq))
        usage.check(db, owner, self.retention)

    @reads
    def whole_conversation(
        self, db: Connection, id: str, owner: str, most_bytes: int
    ) -> Sequence[ItemRecord]:
        """All items of the conversation, in order. Raises TooLarge if they exceed `most_bytes`."""
        seq = find(db, "conversation", id, owner)
        StoredSize("conversation", most_bytes).add(db, seq)
        return all_of(db, seq)

    @reads
    def conversation_items(
        self,
        db: Connection,
        id: str,
        owner: str,
        after: str | None = None,
        limit: int = 20,
        order: Order = "desc",
    ) -> Page:
        return page(db, find(db, "conversation", id, owner), after, limit, order)

    @reads
    def conversation_item(self, db: Connection, id: str, owner: str, item: str) -> ItemRecord:
        seq = find(db, "conversation", id, owner)
        found = db.execute(
            "SELECT id, body FROM items WHERE id = ? AND record = ?", (item, seq)
        ).fetchone()
        if found is None:
            raise NotFound(f"Item with id '{item}' not found in conversation '{id}'.")
        return ItemRecord(*found)

    @writes
    def delete_item(self, db: Connection, id: str, owner: str, item: str) -> None:
        seq = find(db, "conversation", id, owner)
        gone = db.execute("DELETE FROM items WHERE id = ? AND record = ?", (item, seq))
        if gone.rowcount == 0:
            raise NotFound(f"Item with id '{item}' not found in conversation '{id}'.")
