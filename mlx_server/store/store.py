"""The store itself: what can be done with records and their items, and how old ones are pruned.

Old records are removed by a clock of its own, which distrusts jumps of the system clock.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Self, TypeVar

import msgspec

from mlx_server import limits
from mlx_server.errors import BadRequest, NotFound, StoreFull, StoreUnavailable, TooLarge
from mlx_server.store import usage
from mlx_server.store.contents import Contents
from mlx_server.store.database import DAY, AgeClock, Database, checked_size, reads, writes
from mlx_server.store.file import StoreFile
from mlx_server.store.records import (
    CONVERSATION_STATUSES,
    KINDS,
    RUNNING,
    ItemRecord,
    JobKind,
    Kind,
    Order,
    Page,
    Record,
    Retention,
    RunNews,
    Stats,
)
from mlx_server.store.usage import check_usage
from mlx_server.system.servers import Servers

log = logging.getLogger("mlx_server.store")

K = TypeVar("K", bound=JobKind)

BATCH_RECORDS = 50
BATCH_BYTES = 16 * 2**20
"""The most records, and about the most bytes, that one step of pruning removes. Other calls run
between the steps."""
BATCH_PAGES = 4096
"""The most free pages that one step of pruning returns to the file system."""

COLUMNS = ("kind", "id", "created_at", "status", "previous", "conversation", "labels")
ADD_RECORD = (
    "INSERT INTO records"
    " (kind, owner, id, created_at, used_at, status, previous, conversation, labels, body, server)"
    " VALUES (:kind, :owner, :id, :created_at, :used_at, :status, :previous, :conversation,"
    " :labels, :body, :server)"
)
PUT_RECORD = (
    f"{ADD_RECORD} ON CONFLICT (id, owner, kind) DO UPDATE SET"
    " used_at = excluded.used_at, labels = excluded.labels, body = excluded.body"
)

SET_STATUS = (
    "UPDATE records SET status = :status,"
    " body = CAST(json_set(CAST(body AS TEXT), '$.status', :status) AS BLOB) WHERE seq = :seq"
)

INTERRUPTED = {
    "code": "server_error",
    "message": "The server stopped before this response was finished. Send the request again.",
}

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

HAS_MODEL = " AND json_extract(labels, '$.model') = ?"
HAS_LABEL = (
    " AND EXISTS (SELECT 1 FROM json_each(labels, '$.metadata') AS label"
    " WHERE label.key = ? AND label.value = ?)"
)
HAS_PURPOSE = " AND json_extract(labels, '$.purpose') = ?"
NOT_EXPIRED = " AND json_extract(labels, '$.expires_at') > ?"

FILE_USAGE = (
    "SELECT count(*), total(json_extract(labels, '$.bytes')), total(owner = ?),"
    " total(iif(owner = ?, json_extract(labels, '$.bytes'), 0)) FROM records WHERE kind = 'file'"
)
NAMED_CONTENTS = (
    "SELECT id FROM records WHERE kind = 'file' UNION SELECT content.value"
    " FROM records, json_each(labels, '$.contents') AS content"
    " WHERE kind IN ('batch', 'message batch')"
)


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Selects completions by their model and metadata, files by their purpose and whether they have
    not expired."""

    model: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    purpose: str | None = None
    expires_after: float | None = None

    def condition(self) -> tuple[str, list[str | float]]:
        """The filter as SQL to append to another condition, and the parameters of that SQL."""
        given: list[tuple[str, str | float | None]] = [
            (HAS_MODEL, self.model),
            (HAS_PURPOSE, self.purpose),
            (NOT_EXPIRED, self.expires_after),
        ]
        set_ = [(sql, value) for sql, value in given if value is not None]
        pairs = [text for pair in self.metadata.items() for text in pair]
        condition = "".join(sql for sql, _ in set_) + HAS_LABEL * len(self.metadata)
        return condition, [*(value for _, value in set_), *pairs]


ALL = RecordFilter()


class Store(Database):
    """Responses, conversations, chat completions, files and batches in one file, which several
    servers may share, and the contents of files in a folder next to it.

    A client sees only the records of its `owner`, which identifies the client, or is "" if clients
    are not distinguished. Every call except `close` raises StoreUnavailable while the file can't be
    used.
    """

    def __init__(
        self, file: StoreFile, retention: Retention, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(file, retention)
        self.servers = file.servers
        self.contents = Contents(file.path.parent)
        self._ageing = AgeClock(clock)

    @classmethod
    async def open(
        cls, path: Path, retention: Retention | None = None, clock: Callable[[], float] = time.time
    ) -> Self:
        """Opens the file, and marks responses as failed whose servers have ended.

        If the file can't be used, the error is logged, and later calls try again.
        """
        store = cls(StoreFile(path, Servers(path.parent)), retention or Retention(), clock)
        with suppress(StoreUnavailable):
            await store.adopt()
        return store

    @writes
    def adopt(self, db: Connection) -> None:
        """Marks responses as failed that a server was running which has ended."""
        running = db.execute(
            "SELECT seq, server FROM records WHERE status IN ('queued', 'in_progress')"
            " AND kind = 'response'"
        ).fetchall()
        living = {self.servers.id, *self.servers.others()} if running else set()
        interrupted = [seq for seq, server in running if server not in living]
        for seq in interrupted:
            _fail(db, seq)
        if interrupted:
            log.warning("responses whose server has ended, now marked failed: %d", len(interrupted))

    @writes
    def add(
        self,
        db: Connection,
        record: Record,
        owner: str,
        items: Sequence[ItemRecord] = (),
        events: Sequence[bytes] = (),
    ) -> None:
        """Stores a new record and its input items. A response that has ended needs no `put`."""
        if record.conversation is not None:
            with suppress(NotFound):  # it may have been deleted since the request began
                _check_count(db, _seq(db, "conversation", record.conversation, owner), more=1)
        server = self.servers.id if record.status in RUNNING else None
        seq = db.execute(ADD_RECORD, _row(record, owner, server)).lastrowid
        assert seq is not None
        _append(db, seq, items, output=False)
        _fill(db, seq, record, owner, events)
        check_usage(db, owner, self.retention)

    @reads
    def check_room(self, db: Connection, owner: str) -> None:
        """Raises StoreFull if the limits on bytes leave no room for the owner's next record."""
        check_usage(db, owner, self.retention)

    @reads
    def get(self, db: Connection, kind: Kind, id: str, owner: str) -> Record:
        seq = _seq(db, kind, id, owner)
        row = db.execute(
            "SELECT created_at, body, status, previous, conversation, labels FROM records"
            " WHERE seq = ?",
            (seq,),
        ).fetchone()
        return replace(Record(kind, id, *row), output=tuple(_items(db, seq, "AND output = 1")))

    @writes
    def put(
        self, db: Connection, response: Record, owner: str, events: Sequence[bytes] = ()
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
            (response.status, checked_size(response.body), response.id, owner),
        ).fetchall()
        for (seq,) in updated:
            db.execute("DELETE FROM items WHERE record = ? AND output = 1", (seq,))
            db.execute("DELETE FROM events WHERE record = ?", (seq,))
            _fill(db, seq, response, owner, events)
        if response.output or events:
            check_usage(db, owner, self.retention)
        return bool(updated)

    @writes
    def share(self, db: Connection, news: Sequence[RunNews]) -> list[tuple[str, str]]:
        """Stores what is new of responses that this server runs, for the clients of others. Returns
        the ids and owners of those that have been cancelled or deleted there."""
        unwanted = []
        for id, owner, status, first, events in news:
            row = db.execute(
                "SELECT seq, status FROM records WHERE kind = 'response' AND id = ? AND owner = ?"
                " AND status IN ('queued', 'in_progress') AND NOT cancelled",
                (id, owner),
            ).fetchone()
            if row is None:
                unwanted.append((id, owner))
                continue
            seq, stored_status = row
            if status != stored_status:
                db.execute(SET_STATUS, {"seq": seq, "status": status})
            numbered = ((seq, number, body) for number, body in enumerate(events, first))
            db.executemany("INSERT OR IGNORE INTO events VALUES (?, ?, ?)", numbered)
        return unwanted

    @writes
    def cancel(self, db: Connection, id: str, owner: str) -> None:
        """Makes the server that runs the response cancel it."""
        seq = _seq(db, "response", id, owner)
        db.execute("UPDATE records SET cancelled = 1 WHERE seq = ?", (seq,))

    @writes
    def update(
        self,
        db: Connection,
        kind: Kind,
        id: str,
        owner: str,
        body: bytes,
        *,
        labels: str | None = None,
        used_at: float | None = None,
    ) -> None:
        """`used_at`: the time of this use, for records whose age is that of their last use."""
        row = (checked_size(body), labels, used_at, _seq(db, kind, id, owner))
        db.execute(
            "UPDATE records SET body = ?, labels = ?, used_at = coalesce(?, used_at) WHERE seq = ?",
            row,
        )
        check_usage(db, owner, self.retention)

    @writes
    def delete(self, db: Connection, kind: Kind, id: str, owner: str) -> None:
        """Deletes a record and its items. The responses of a conversation have copies of theirs."""
        db.execute("DELETE FROM records WHERE seq = ?", (_seq(db, kind, id, owner),))

    @writes
    def put_page_conversation(self, db: Connection, conversation: Record, owner: str) -> None:
        """Stores a conversation of the page, in place of the one with its id if there is one."""
        db.execute(PUT_RECORD, _row(conversation, owner))
        check_usage(db, owner, self.retention)

    @reads
    def page_conversations(self, db: Connection, owner: str) -> list[str]:
        """The labels of the conversations of the page, the last used first."""
        rows = db.execute(
            "SELECT labels FROM records WHERE kind = 'page conversation' AND owner = ?"
            " ORDER BY used_at DESC, seq DESC LIMIT ?",
            (owner, limits.LISTED_CONVERSATIONS),
        )
        return [labels for (labels,) in rows]

    @reads
    def items(
        self,
        db: Connection,
        kind: Kind,
        id: str,
        owner: str,
        after: str | None = None,
        limit: int = 20,
        order: Order = "desc",
    ) -> Page:
        """A page of the record's items, without a response's output."""
        place = "items WHERE record = ? AND output = 0"
        return _page(db, place, [_seq(db, kind, id, owner)], after, limit, order)

    @reads
    def records(
        self,
        db: Connection,
        kind: Kind,
        owner: str,
        wanted: RecordFilter = ALL,
        after: str | None = None,
        limit: int = 20,
        order: Order = "asc",
    ) -> Page:
        """A page of the records that the filter selects, each as an item with its body."""
        place = "records WHERE kind = ? AND owner = ?"
        return _page(db, place, [kind, owner], after, limit, order, wanted.condition())

    @reads
    def file_room(self, db: Connection, owner: str) -> int:
        """The bytes that the owner's next file may have. Raises StoreFull if there are none."""
        return _file_room(db, owner)

    @writes
    def add_file(self, db: Connection, file: Record, owner: str, nbytes: int) -> None:
        """Stores the record of a file whose content is complete."""
        if nbytes > _file_room(db, owner):
            raise _files_full()
        db.execute(ADD_RECORD, _row(file, owner))

    @writes
    def edit(
        self,
        db: Connection,
        kind: JobKind,
        id: str,
        owner: str,
        change: Callable[[Record], Record],
        files: Sequence[Record] = (),
    ) -> Record:
        """Replaces the status, body and labels of a batch by those that `change` makes of it, which
        is called once, and stores its files in the same transaction."""
        seq = _seq(db, kind, id, owner)
        row = db.execute(
            "SELECT created_at, body, status, labels FROM records WHERE seq = ?", (seq,)
        ).fetchone()
        created_at, body, status, labels = row
        changed = change(Record(kind, id, created_at, body, status, labels=labels))
        db.execute(
            "UPDATE records SET status = ?, body = ?, labels = ? WHERE seq = ?",
            (changed.status, checked_size(changed.body), changed.labels, seq),
        )
        for file in files:
            db.execute(ADD_RECORD, _row(file, owner))
        return changed

    @writes
    def claim(
        self, db: Connection, owners: Collection[str], kinds: Collection[K]
    ) -> list[tuple[K, str, str]]:
        """Takes over the running jobs of these owners and kinds that no living server has. Returns
        the kind, id and owner of each."""
        running = db.execute(
            "SELECT seq, kind, id, owner, server FROM records"
            " WHERE status IN ('queued', 'in_progress') AND status = 'in_progress'"  # by the index
        ).fetchall()
        living = {self.servers.id, *self.servers.others()} if running else set()
        left = [
            row for row in running if row[4] not in living and row[3] in owners and row[1] in kinds
        ]
        for seq, *_ in left:
            db.execute("UPDATE records SET server = ? WHERE seq = ?", (self.servers.id, seq))
        return [(kind, id, owner) for _, kind, id, owner, _ in left]

    async def sweep(self) -> None:
        """Removes the contents that no record names and no server is making."""
        # those without a lock now have got their records before, or never will
        left = await asyncio.to_thread(self.contents.unlocked)
        named = await self._named_contents() if left else set()
        left = [name for name in left if name not in named]
        await asyncio.to_thread(self.contents.remove_unlocked, left)

    @reads
    def _named_contents(self, db: Connection) -> set[str]:
        return {name for (name,) in db.execute(NAMED_CONTENTS)}

    @writes
    def add_items(
        self, db: Connection, id: str, owner: str, items: Sequence[ItemRecord], now: float
    ) -> None:
        seq = _seq(db, "conversation", id, owner)
        _append(db, seq, items, output=False)
        _check_count(db, seq)
        db.execute("UPDATE records SET used_at = ? WHERE seq = ?", (now, seq))
        check_usage(db, owner, self.retention)

    @reads
    def conversation_item(self, db: Connection, id: str, owner: str, item: str) -> ItemRecord:
        place = (_seq(db, "conversation", id, owner), item)
        row = db.execute("SELECT id, body FROM items WHERE record = ? AND id = ?", place).fetchone()
        if row is None:
            raise _no_item(id, item)
        return ItemRecord(*row)

    @writes
    def delete_item(self, db: Connection, id: str, owner: str, item: str) -> None:
        place = (_seq(db, "conversation", id, owner), item)
        if not db.execute("DELETE FROM items WHERE record = ? AND id = ?", place).rowcount:
            raise _no_item(id, item)

    @reads
    def item(
        self, db: Connection, id: str, owner: str, most_bytes: int = limits.STORED_PIECE_BYTES
    ) -> ItemRecord:
        """The owner's newest item with this id, in any record. Raises NotFound or TooLarge."""
        seq = db.execute(
            "SELECT max(items.seq) FROM items JOIN records ON records.seq = record"
            " WHERE items.id = ? AND owner = ?",
            (id, owner),
        ).fetchone()[0]
        if seq is None:
            raise NotFound(f"Item with id '{id}' not found.")
        (size,) = db.execute("SELECT length(body) FROM items WHERE seq = ?", (seq,)).fetchone()
        if size > most_bytes:
            raise items_too_large("input")
        row = db.execute("SELECT id, body FROM items WHERE seq = ?", (seq,)).fetchone()
        return ItemRecord(*row)

    @reads
    def whole_conversation(
        self, db: Connection, id: str, owner: str, most_bytes: int
    ) -> Sequence[ItemRecord]:
        """All items of the conversation, in order. Raises TooLarge if they exceed `most_bytes`."""
        return _all_items(db, [_seq(db, "conversation", id, owner)], "conversation", most_bytes)

    @reads
    def chain(
        self, db: Connection, id: str, owner: str, most_bytes: int = limits.STORED_PIECE_BYTES
    ) -> Sequence[ItemRecord]:
        """The input and output items of every response from the first of the chain to this one.
        Raises NotFound, BadRequest or TooLarge."""
        parameters = {"id": id, "owner": owner, "most": (most := limits.CHAIN_RESPONSES)}
        links = db.execute(CHAIN, parameters).fetchall()
        if not links:
            raise NotFound(f"Response with id '{id}' not found.")
        status = "SELECT status FROM records WHERE seq = ?"
        if db.execute(status, links[-1][:1]).fetchone()[0] in RUNNING:
            raise BadRequest(
                f"Previous response '{id}' has not ended yet. Wait for it, or cancel it.",
                param="previous_response_id",
                code="previous_response_not_ended",
            )
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
        return _all_items(db, [seq for seq, *_ in links], "previous_response_id", most_bytes)

    @reads
    def events(
        self, db: Connection, id: str, owner: str, starting_after: int = -1, limit: int = 1000
    ) -> tuple[list[bytes], bool]:
        """A page of the response's events, in order and numbered from 0; empty if the response was
        not streamed. And whether more may follow, since the response is running."""
        record = _seq(db, "response", id, owner)
        status = db.execute("SELECT status FROM records WHERE seq = ?", (record,)).fetchone()[0]
        rows = db.execute(
            "SELECT number, length(body) FROM events WHERE record = ? AND number > ?"
            " ORDER BY number LIMIT ?",
            (record, starting_after, limit),
        ).fetchall()
        bodies = db.execute(
            "SELECT body FROM events WHERE record = ? AND number > ? ORDER BY number LIMIT ?",
            (record, starting_after, _fitting_count([size for _, size in rows])),
        )
        return [body for (body,) in bodies], status in RUNNING

    async def prune(self) -> int:
        """Removes records that exceed the age or the count, the least recently used first. Returns
        the number of removed records."""
        pruned = 0
        for kind in KINDS:
            while removed := await self._prune_some(kind):
                pruned += removed
        return pruned + await self._prune_expired()

    @writes
    def _prune_expired(self, db: Connection) -> int:
        """Removes the files whose clients let them expire."""
        now = self._ageing.now(db)
        return db.execute(
            "DELETE FROM records WHERE kind = 'file' AND json_extract(labels, '$.expires_at') <= ?",
            (now,),
        ).rowcount

    @writes
    def _prune_some(self, db: Connection, kind: Kind) -> int:
        total = db.execute("SELECT count(*) FROM records WHERE kind = ?", (kind,)).fetchone()[0]
        surplus = total - limits.STORED_RESPONSES if kind != "file" else 0  # no more are accepted
        expired = self._ageing.now(db) - self.retention.days * DAY
        # a clock that was set back makes new records look older than those made before
        by_creation = surplus > 0 and kind in ("response", "completion")
        oldest = db.execute(
            "SELECT seq, used_at FROM records WHERE kind = ?"
            " AND status NOT IN ('queued', 'in_progress')"
            " ORDER BY iif(?, seq, used_at), seq LIMIT ?",
            (kind, by_creation, BATCH_RECORDS),
        ).fetchall()
        removed = size = 0
        for seq, used_at in oldest:
            if size >= BATCH_BYTES or (removed >= surplus and used_at >= expired):
                break
            size += _record_size(db, seq)
            db.execute("DELETE FROM records WHERE seq = ?", (seq,))
            removed += 1
        _release_free_pages(db)
        return removed

    @reads
    def stats(self, db: Connection) -> Stats:
        rows = db.execute("SELECT kind, count(*) FROM records GROUP BY kind").fetchall()
        counts: dict[Kind, int] = dict.fromkeys(KINDS, 0) | dict(rows)
        items = db.execute("SELECT count(*) FROM items").fetchone()[0]
        oldest, newest = db.execute(
            "SELECT min(created_at), max(created_at) FROM records WHERE kind = 'response'"
        ).fetchone()
        path = self._file.path
        files = (path.with_name(path.name + ending) for ending in ("", "-wal", "-shm"))
        size = sum(file.stat().st_size for file in files if file.exists())
        return Stats(
            counts["response"],
            counts["conversation"] + counts["page conversation"],
            counts["completion"],
            items,
            size,
            usage.total_bytes(db),
            oldest,
            newest,
        )


def _seq(db: Connection, kind: Kind, id: str, owner: str) -> int:
    """The record's `seq`. Raises NotFound, even for a record of another owner."""
    row = db.execute(
        "SELECT seq FROM records WHERE kind = ? AND id = ? AND owner = ?", (kind, id, owner)
    ).fetchone()
    if row is None:
        raise NotFound(f"{kind.capitalize()} with id '{id}' not found.")
    return int(row[0])


def _append(db: Connection, record: int, items: Iterable[ItemRecord], *, output: bool) -> None:
    for item in items:
        row = (record, output, item.id, checked_size(item.body))
        try:
            db.execute("INSERT INTO items (record, output, id, body) VALUES (?, ?, ?, ?)", row)
        except sqlite3.IntegrityError as error:
            raise BadRequest(
                f"An item with id '{item.id}' already exists. Use another id, or leave it out."
            ) from error


def _fill(db: Connection, seq: int, record: Record, owner: str, events: Sequence[bytes]) -> None:
    """Stores the output and the events of a response, and adds its items to its conversation if it
    has ended."""
    _append(db, seq, record.output, output=True)
    rows = ((seq, number, checked_size(body)) for number, body in enumerate(events))
    db.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
    if record.status not in CONVERSATION_STATUSES:
        return
    conversations = db.execute(
        "UPDATE records SET used_at = max(used_at, ?) WHERE kind = 'conversation' AND owner = ?"
        " AND id = (SELECT conversation FROM records WHERE seq = ?) RETURNING seq",
        (record.created_at, owner, seq),
    ).fetchall()
    for (conversation,) in conversations:  # which may have some of the items already
        db.execute(
            "INSERT OR IGNORE INTO items (record, output, id, body)"
            " SELECT ?, 0, id, body FROM items WHERE record = ? ORDER BY output, seq",
            (conversation, seq),
        )


def _fail(db: Connection, seq: int) -> None:
    """Marks a response as failed, and ends its events if it has any."""
    (body,) = db.execute("SELECT body FROM records WHERE seq = ?", (seq,)).fetchone()
    try:
        response = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:  # a damaged body must not keep the store from being used
        response = {}
    failed = response | {"status": "failed", "error": INTERRUPTED}
    row = (msgspec.json.encode(failed), seq)
    db.execute("UPDATE records SET status = 'failed', body = ? WHERE seq = ?", row)
    last = db.execute("SELECT max(number) FROM events WHERE record = ?", (seq,)).fetchone()[0]
    if last is not None:
        event = {"type": "response.failed", "sequence_number": last + 1}
        ended = msgspec.json.encode({**event, "response": {**failed, "output": []}})
        db.execute("INSERT INTO events VALUES (?, ?, ?)", (seq, last + 1, ended))


def _row(record: Record, owner: str, server: str | None = None) -> dict[str, Any]:
    """server: the id of the one that runs it."""
    row = {name: getattr(record, name) for name in COLUMNS} | {"body": checked_size(record.body)}
    return {**row, "owner": owner, "used_at": record.created_at, "server": server}


def _file_room(db: Connection, owner: str) -> int:
    row = db.execute(FILE_USAGE, (owner, owner)).fetchone()
    files, nbytes, own_files, own_bytes = row
    room = int(min(limits.FILES_BYTES - nbytes, limits.FILES_BYTES // 2 - own_bytes))
    if room <= 0 or files >= limits.FILES or own_files >= limits.FILES // 2:
        raise _files_full()
    return room


def _files_full() -> StoreFull:
    return StoreFull(
        f"There is no room for this file: there may be {limits.FILES} files with "
        f"{limits.FILES_BYTES} bytes, half of them of one key. Delete files "
        "(DELETE /v1/files/ID), or let them expire (`expires_after`)."
    )


def _items(db: Connection, record: int, condition: str = "") -> list[ItemRecord]:
    rows = db.execute(
        f"SELECT id, body FROM items WHERE record = ? {condition} ORDER BY output, seq",  # noqa: S608
        (record,),
    )
    return [ItemRecord(*row) for row in rows]


def _no_item(conversation: str, item: str) -> NotFound:
    return NotFound(f"Item with id '{item}' not found in conversation '{conversation}'.")


def _all_items(
    db: Connection, records: Sequence[int], param: str, most_bytes: int
) -> list[ItemRecord]:
    """The items of all these records, which are measured before they are read."""
    count = size = 0
    for record in reversed(records):
        row = db.execute(
            "SELECT count(*), total(length(body)) FROM items WHERE record = ?", (record,)
        )
        more, nbytes = row.fetchone()
        count, size = count + more, size + int(nbytes)
        if size > most_bytes:
            raise items_too_large(param)
        if count > (most := limits.READ_BACK_ITEMS):
            raise TooLarge(
                f"`{param}` refers to more than {most} stored items. Start a new conversation and "
                "send the items that still matter in `input`.",
                param=param,
            )
    return [item for record in records for item in _items(db, record)]


def items_too_large(param: str) -> TooLarge:
    return TooLarge(
        f"This request and the stored items that `{param}` refers to are together larger than "
        "`server.max_body_bytes`. Start a new conversation and send the items that still matter "
        "in `input`, or raise the limit in models.yaml.",
        param=param,
    )


def _check_count(db: Connection, conversation: int, more: int = 0) -> None:
    """Raises BadRequest if the conversation would have too many items after adding `more`."""
    count = db.execute("SELECT count(*) FROM items WHERE record = ?", (conversation,)).fetchone()[0]
    if count + more > (most := limits.CONVERSATION_ITEMS):
        raise BadRequest(
            f"A conversation can have {most} items at most. Delete some, or start another.",
            param="conversation",
        )


FIRST = {"asc": ("> ?", 0), "desc": ("< ?", 2**63 - 1)}
"""Where a page's rows lie from the one before it, and what lies before all, by order."""


def _page(
    db: Connection,
    place: str,
    parameters: Sequence[str | int],
    after: str | None,
    limit: int,
    order: Order,
    filtered: tuple[str, Sequence[str | float]] = ("", ()),
) -> Page:
    """A page of the rows of a `place`, a table and its condition, in the order in which they were
    stored. SQLite gets the `length` of a body without reading it."""
    follows, start = FIRST[order]
    if after is not None:
        row = db.execute(f"SELECT seq FROM {place} AND id = ?", (*parameters, after)).fetchone()  # noqa: S608
        if row is None:
            raise BadRequest(
                f"`after` is '{after}', which is not in this list. Use the `last_id` of a page.",
                param="after",
            )
        (start,) = row
    condition, more = filtered
    rows = db.execute(
        f"SELECT seq, length(body) FROM {place} AND seq {follows}{condition}"  # noqa: S608
        f" ORDER BY seq {order} LIMIT ?",
        (*parameters, start, *more, limit + 1),
    ).fetchall()
    fitting = rows[: _fitting_count([size for _, size in rows[:limit]])]
    table = place.partition(" ")[0]
    items = [
        ItemRecord(*db.execute(f"SELECT id, body FROM {table} WHERE seq = ?", (seq,)).fetchone())  # noqa: S608
        for seq, _ in fitting
    ]
    return Page(items, has_more=len(rows) > len(fitting))


def _fitting_count(sizes: Sequence[int]) -> int:
    """The number of rows, from the first on, that fit in a page. It is at least one, so that paging
    never stops."""
    return max(1, sum(end <= limits.PAGE_BYTES for end in accumulate(sizes)))


def _release_free_pages(db: Connection) -> None:
    """Returns free pages to the file system.

    It takes one statement for each page, since `sqlite3` runs only the first step of a pragma
    without columns, which frees one page.
    """
    free = db.execute("PRAGMA freelist_count").fetchone()[0]
    for _ in range(min(free, BATCH_PAGES)):
        db.execute("PRAGMA incremental_vacuum(1)")


def _record_size(db: Connection, seq: int) -> int:
    sizes = db.execute(
        "SELECT (SELECT total(length(body)) FROM items WHERE record = :seq)"
        " + (SELECT total(length(body)) FROM events WHERE record = :seq)",
        {"seq": seq},
    )
    return int(sizes.fetchone()[0])
