"""The complete store: it opens its file, and prunes old records.

Old records are removed by a clock of its own, which distrusts jumps of the system clock.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from sqlite3 import Connection
from typing import Self

from mlx_server import limits
from mlx_server.errors import StoreUnavailable
from mlx_server.store import usage
from mlx_server.store.completions import Completions
from mlx_server.store.conversations import Conversations, Kind
from mlx_server.store.database import reads, writes
from mlx_server.store.file import OwnedFile, SharedFile
from mlx_server.store.records import Retention, Stats
from mlx_server.store.responses import Responses

DAY = 86400.0

BATCH_RECORDS = 50
BATCH_BYTES = 16 * 2**20
"""The most records, and about the most bytes, that one step of pruning removes. Other calls run
between the steps."""
BATCH_PAGES = 4096
"""The most free pages that one step of pruning returns to the file system."""


class Store(Responses, Conversations, Completions):
    """Responses, conversations and chat completions in one file.

    A client sees only the records of its `owner`, which identifies the client, or is "" if clients
    are not distinguished. Every call except `close` raises StoreUnavailable while the file can't be
    used.
    """

    def __init__(
        self, file: SharedFile, retention: Retention, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(file, retention)
        self._ageing = AgeClock(clock)

    @classmethod
    async def open(
        cls, path: Path, retention: Retention | None = None, clock: Callable[[], float] = time.time
    ) -> Self:
        """Opens the file for a server, and marks responses as failed that an earlier server left
        running.

        If the file can't be used, the error is logged, and later calls try again.
        """
        store = cls(OwnedFile(path), retention or Retention(), clock)
        with suppress(StoreUnavailable):
            await store.stats()
        return store

    @classmethod
    async def visit(cls, path: Path, retention: Retention | None = None) -> Self:
        """Opens the file to read and prune it, even if a server has it open."""
        return cls(SharedFile(path), retention or Retention())

    async def prune(self) -> int:
        """Removes records that exceed the age or the count, the least recently used first. Returns
        the number of removed records."""
        pruned = 0
        kinds: tuple[Kind, ...] = ("response", "conversation", "completion")
        for kind in kinds:
            while removed := await self._prune_some(kind):
                pruned += removed
        return pruned

    @writes
    def _prune_some(self, db: Connection, kind: Kind) -> int:
        total = db.execute("SELECT count(*) FROM records WHERE kind = ?", (kind,)).fetchone()[0]
        surplus = total - limits.STORED_RESPONSES
        expired = self._ageing.now(db) - self.retention.days * DAY
        # a clock that was set back makes new records look older than those made before
        by_creation = surplus > 0 and kind != "conversation"
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
            size += _size(db, seq)
            db.execute("DELETE FROM records WHERE seq = ?", (seq,))
            removed += 1
        _release_free_pages(db)
        return removed

    @reads
    def stats(self, db: Connection) -> Stats:
        responses, oldest, newest = db.execute(
            "SELECT count(*), min(created_at), max(created_at) FROM records WHERE kind = 'response'"
        ).fetchone()
        conversations, completions = db.execute(
            "SELECT count(*) FILTER (WHERE kind = 'conversation'),"
            " count(*) FILTER (WHERE kind = 'completion') FROM records"
        ).fetchone()
        items = db.execute("SELECT count(*) FROM items").fetchone()[0]
        stored = usage.total(db)
        counts = (responses, conversations, completions, items)
        return Stats(*counts, self._bytes(), stored, oldest, newest)

    def _bytes(self) -> int:
        path = self._file.path
        files = (path.with_name(path.name + ending) for ending in ("", "-wal", "-shm"))
        return sum(file.stat().st_size for file in files if file.exists())


def _release_free_pages(db: Connection) -> None:
    """Returns free pages to the file system.

    It takes one statement for each page, since `sqlite3` runs only the first step of a pragma
    without columns, which frees one page.
    """
    free = db.execute("PRAGMA freelist_count").fetchone()[0]
    for _ in range(min(free, BATCH_PAGES)):
        db.execute("PRAGMA incremental_vacuum(1)")


def _size(db: Connection, seq: int) -> int:
    sizes = db.execute(
        "SELECT (SELECT total(length(body)) FROM items WHERE record = :seq)"
        " + (SELECT total(length(body)) FROM events WHERE record = :seq)",
        {"seq": seq},
    )
    return int(sizes.fetchone()[0])


JUMP_SECONDS = 366 * DAY
"""A system clock that is this far ahead of its last reading is probably wrong, for example because
of an empty battery or a wrong time server."""

DOUBT_SECONDS = DAY / 4
"""How long the clock must stay ahead, while the server runs, before it is trusted."""

NEVER = -math.inf


class AgeClock:
    def __init__(
        self, clock: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._steady = steady
        self._doubted_since: float | None = None

    def now(self, db: Connection) -> float:
        """The Unix time; `NEVER` while the clock is in doubt, so that no record is old then.

        A clock that was set back is trusted at once, since it makes no record older.
        """
        now, steady = self._clock(), self._steady()
        seen = _last_time(db)
        if seen is None or now - seen < JUMP_SECONDS:
            self._doubted_since = None
        elif self._doubted_since is None:
            self._doubted_since = steady
        if self._doubted_since is not None and steady - self._doubted_since < DOUBT_SECONDS:
            return NEVER
        _store_time(db, now)
        return now


def _last_time(db: Connection) -> float | None:
    """The time of the last pruning or, before the first one, of the first record's last use."""
    row = db.execute("SELECT at FROM seen").fetchone()
    row = row or db.execute("SELECT used_at FROM records ORDER BY seq LIMIT 1").fetchone()
    return float(row[0]) if row else None


def _store_time(db: Connection, now: float) -> None:
    db.execute("DELETE FROM seen")
    db.execute("INSERT INTO seen VALUES (?)", (now,))
