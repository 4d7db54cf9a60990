"""The store's operations on conversations and their items."""

from collections.abc import Sequence
from sqlite3 import Connection

from mlx_server.errors import NotFound
from mlx_server.store import usage
from mlx_server.store.database import Database, reads, sized, writes
from mlx_server.store.items import (
    Order,
    StoredSize,
    add,
    all_of,
    append,
    check_count,
    drop,
    find,
    page,
)
from mlx_server.store.records import ConversationRecord, ItemRecord, Page


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
