"""The store's operations on responses, their items and their event streams."""

from collections.abc import Sequence
from contextlib import suppress
from sqlite3 import Connection

import msgspec

from mlx_server import limits
from mlx_server.errors import BadRequest, NotFound
from mlx_server.store import usage
from mlx_server.store.conversations import (
    Order,
    StoredSize,
    add,
    all_of,
    append,
    check_count,
    drop,
    find,
    fitting_count,
    item_at,
    items_too_large,
    output_of,
    page,
    size_at,
)
from mlx_server.store.database import Database, reads, sized, writes
from mlx_server.store.records import CONVERSATION_STATUSES, ItemRecord, Page, ResponseRecord

CHAIN = """
    WITH RECURSIVE chain (seq, id, previous, depth) AS (
        SELECT seq, id, previous, 1 FROM records
            WHERE kind = 'response' AND id = :id AND owner = :owner
        UNION ALL
        SELECT records.seq, records.id, records.previous, depth + 1 FROM chain JOIN records
            ON kind = 'response' AND records.id = chain.previous AND owner = :owner
            WHERE depth < :most
    )
    SELECT seq, id, previous FROM chain ORDER BY depth DESC
"""


class Responses(Database):
    @writes
    def begin(
        self,
        db: Connection,
        response: ResponseRecord,
        owner: str,
        input: Sequence[ItemRecord] = (),
        events: Sequence[bytes] = (),
    ) -> None:
        """Stores a new response. If it has ended already, no `put` is needed."""
        if response.conversation is not None:
            self._check_conversation(db, response.conversation, owner)
        seq = add(
            db,
            "response",
            owner,
            response,
            input,
            status=response.status,
            previous=response.previous,
            conversation=response.conversation,
            body=_json_object(response.body),
        )
        self._fill(db, seq, response, owner, events)
        usage.check(db, owner, self.retention)

    @writes
    def put(
        self, db: Connection, response: ResponseRecord, owner: str, events: Sequence[bytes] = ()
    ) -> bool:
        """Replaces the response's status, body, output and events; `previous` and `conversation`
        stay.

        Returns False and changes nothing if the response was deleted or has ended already, so that
        the first end counts. An end without output is stored even if it exceeds the limits on
        bytes.
        """
        updated = db.execute(
            "UPDATE records SET status = ?, body = ? WHERE kind = 'response' AND id = ?"
            " AND owner = ? AND status IN ('queued', 'in_progress') RETURNING seq",
            (response.status, _json_object(response.body), response.id, owner),
        ).fetchall()
        for (seq,) in updated:
            db.execute("DELETE FROM items WHERE record = ? AND output = 1", (seq,))
            db.execute("DELETE FROM events WHERE record = ?", (seq,))
            self._fill(db, seq, response, owner, events)
        if response.output or events:
            usage.check(db, owner, self.retention)
        return bool(updated)

    @reads
    def get(self, db: Connection, id: str, owner: str) -> ResponseRecord:
        seq = find(db, "response", id, owner)
        row = db.execute(
            "SELECT created_at, status, body, previous, conversation FROM records WHERE seq = ?",
            (seq,),
        ).fetchone()
        created_at, status, body, previous, conversation = row
        return ResponseRecord(
            id, created_at, status, body, output_of(db, seq), previous, conversation
        )

    @writes
    def delete(self, db: Connection, id: str, owner: str) -> None:
        drop(db, "response", id, owner)

    @reads
    def input_items(
        self,
        db: Connection,
        id: str,
        owner: str,
        after: str | None = None,
        limit: int = 20,
        order: Order = "desc",
    ) -> Page:
        return page(db, find(db, "response", id, owner), after, limit, order)

    @reads
    def events(
        self, db: Connection, id: str, owner: str, starting_after: int = -1, limit: int = 1000
    ) -> list[bytes]:
        """A page of the response's events, in order and numbered from 0; empty if the response was
        not streamed."""
        record = find(db, "response", id, owner)
        rows = db.execute(
            "SELECT number, length(body) FROM events WHERE record = ? AND number > ?"
            " ORDER BY number LIMIT ?",
            (record, starting_after, limit),
        ).fetchall()
        if not rows:
            return []
        last, _ = rows[fitting_count([size for _, size in rows]) - 1]
        found = db.execute(
            "SELECT body FROM events WHERE record = ? AND number > ? AND number <= ?"
            " ORDER BY number",
            (record, starting_after, last),
        )
        return [body for (body,) in found]

    @reads
    def chain(
        self,
        db: Connection,
        id: str,
        owner: str,
        most_bytes: int = limits.STORED_PIECE_BYTES,
    ) -> list[ItemRecord]:
        """The input and output items of every response from the first of the chain to this one.
        Raises NotFound, BadRequest or TooLarge."""
        parameters = {"id": id, "owner": owner, "most": (most := limits.CHAIN_RESPONSES)}
        links = db.execute(CHAIN, parameters).fetchall()
        if not links:
            raise NotFound(f"Response with id '{id}' not found.")
        _, oldest, missing = links[0]
        if missing and len(links) == most:
            raise BadRequest(
                f"The chain of responses up to '{id}' is longer than {most}. Send the items that "
                "still matter in `input`, without `previous_response_id`.",
                param="previous_response_id",
            )
        if missing:
            raise NotFound(
                f"Response with id '{missing}' not found; it is the `previous_response_id` of "
                f"'{oldest}'."
            )
        size = StoredSize("previous_response_id", most_bytes)
        for seq, *_ in reversed(links):
            size.add(db, seq)
        return [item for seq, *_ in links for item in all_of(db, seq)]

    @reads
    def has_events(self, db: Connection, id: str, owner: str) -> bool:
        record = find(db, "response", id, owner)
        found = db.execute("SELECT 1 FROM events WHERE record = ? LIMIT 1", (record,))
        return found.fetchone() is not None

    @reads
    def item(
        self,
        db: Connection,
        id: str,
        owner: str,
        most_bytes: int = limits.STORED_PIECE_BYTES,
    ) -> ItemRecord:
        """The owner's newest item with this id, in any record. Raises NotFound or TooLarge."""
        seq = db.execute(
            "SELECT max(items.seq) FROM items JOIN records ON records.seq = record"
            " WHERE items.id = ? AND owner = ?",
            (id, owner),
        ).fetchone()[0]
        if seq is None:
            raise NotFound(f"Item with id '{id}' not found.")
        if size_at(db, seq) > most_bytes:
            raise items_too_large("input")
        return item_at(db, seq)

    def _check_conversation(self, db: Connection, id: str, owner: str) -> None:
        with suppress(NotFound):  # the conversation may have been deleted since the request began
            check_count(db, find(db, "conversation", id, owner), more=1)

    def _fill(
        self,
        db: Connection,
        seq: int,
        response: ResponseRecord,
        owner: str,
        events: Sequence[bytes],
    ) -> None:
        append(db, seq, response.output, output=True)
        rows = ((seq, number, sized(body)) for number, body in enumerate(events))
        db.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
        if response.status in CONVERSATION_STATUSES:
            self._touch_conversation(db, seq, owner, response.created_at)

    def _touch_conversation(self, db: Connection, seq: int, owner: str, used_at: float) -> None:
        """Adds the response's items to its conversation, except those that it has already."""
        conversations = db.execute(
            "UPDATE records SET used_at = max(used_at, ?) WHERE kind = 'conversation'"
            " AND owner = ? AND id = (SELECT conversation FROM records WHERE seq = ?)"
            " RETURNING seq",
            (used_at, owner, seq),
        ).fetchall()
        for (conversation,) in conversations:
            db.execute(
                "INSERT OR IGNORE INTO items (record, output, id, body)"
                " SELECT ?, 0, id, body FROM items WHERE record = ? ORDER BY output, seq",
                (conversation, seq),
            )


def _json_object(body: bytes) -> bytes:
    """The body, checked to be a JSON object, so that it can be marked as failed after a crash."""
    msgspec.json.decode(sized(body), type=dict[str, msgspec.Raw])
    return body
