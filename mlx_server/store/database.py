"""The database thread, in which calls run one by one in order, so that the event loop never
blocks, and the clock by which records age."""

import asyncio
import errno
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial, wraps
from sqlite3 import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

from mlx_server import limits
from mlx_server.errors import BadRequest, ShuttingDown, StoreUnavailable, TooLarge, public_message
from mlx_server.store.file import StoreFile
from mlx_server.store.records import ItemRecord, Record, Retention

log = logging.getLogger("mlx_server.store")

D = TypeVar("D", bound="Database")
P = ParamSpec("P")
R = TypeVar("R")

RETRY_SECONDS = 1.0
"""How long calls fail at once after a failure, instead of waiting for the same failure."""

READ = "BEGIN"
WRITE = "BEGIN IMMEDIATE"

REMEDIES = {
    sqlite3.SQLITE_BUSY: "is locked by another program: close that program.",
    sqlite3.SQLITE_FULL: "can't grow because the disk is full: free some space.",
    sqlite3.SQLITE_READONLY: "can't be written: check its permissions and its folder's.",
    sqlite3.SQLITE_CANTOPEN: "can't be opened: check its permissions and its folder's.",
    sqlite3.SQLITE_PERM: "can't be opened: check its permissions and its folder's.",
    sqlite3.SQLITE_CORRUPT: "is damaged. The server renames it and starts a new one: try again.",
    sqlite3.SQLITE_NOTADB: "is damaged. The server renames it and starts a new one: try again.",
    sqlite3.SQLITE_IOERR: "could not be read or written: check the disk and its free space.",
}
"""The failure and its remedy, as an error message ends, by SQLite's primary error code."""

REMEDIES_BY_ERRNO = {
    errno.EROFS: REMEDIES[sqlite3.SQLITE_READONLY],
    errno.EACCES: REMEDIES[sqlite3.SQLITE_CANTOPEN],
    errno.EPERM: REMEDIES[sqlite3.SQLITE_CANTOPEN],
    errno.ENOSPC: REMEDIES[sqlite3.SQLITE_FULL],
    errno.EDQUOT: REMEDIES[sqlite3.SQLITE_FULL],
    errno.EIO: REMEDIES[sqlite3.SQLITE_IOERR],
}
"""The failure and its remedy, by the operating system's error number, for example of the lock
file."""

TRANSIENT = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL)
"""Errors after which the connection is still usable, so that reads go on."""

DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Database:
    """A database that opens its file again at the first call after a failure, so that the server
    need not be restarted."""

    def __init__(self, file: StoreFile, retention: Retention) -> None:
        self.retention = retention
        self._file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._waiting_bytes = 0
        self._closed = False
        self._db: Connection | None = None
        self.trouble = ""  # why the last call failed, until a write succeeds
        self._retry_at = 0.0

    async def close(self) -> None:
        """Closes the file after all calls that were made before. Later calls raise ShuttingDown."""
        if self._closed:
            return
        self._closed = True
        try:
            closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close_file)
        except RuntimeError:  # the interpreter is ending, which waits for all executors' threads
            self._close_file()
            return
        await asyncio.shield(closing)
        self._thread.shutdown(wait=False)

    def _submit(self, work: Callable[[], R], size: int = 0) -> asyncio.Future[R]:
        """Queues work for the thread. size: the bytes that the call holds while it is queued."""
        if self._closed:
            raise ShuttingDown("The store of responses is closed: the server is stopping.")
        self._check_queue(size)
        submitted = asyncio.get_running_loop().run_in_executor(self._thread, work)
        self._waiting_bytes += size
        submitted.add_done_callback(lambda _: self._left_queue(size))
        return submitted

    def _check_queue(self, size: int) -> None:
        """Raises StoreUnavailable if too many calls or bytes are queued, since a disk may be slower
        than the clients."""
        # the executor's own queue is counted, since a cancelled call stays in it until its turn
        is_long = self._thread._work_queue.qsize() >= limits.STORE_CALLS
        most = limits.STORE_CALL_BYTES
        is_large = self._waiting_bytes > 0 and self._waiting_bytes + size > most
        if is_long or is_large:
            raise StoreUnavailable(
                "The store of responses can't keep up with the requests: try again later, or send "
                "`store: false`."
            )

    def _left_queue(self, size: int) -> None:
        self._waiting_bytes -= size

    def _transact(self, begin: str, work: Callable[[Connection], R]) -> R:
        can_read = self._db is not None and begin == READ
        if time.monotonic() < self._retry_at and not can_read:
            raise StoreUnavailable(self.trouble)
        try:
            with _transaction(self._connected(), begin) as db:
                result = work(db)
            if begin != READ:
                self.trouble = ""
            return result
        except sqlite3.IntegrityError:  # the call's arguments are wrong, and the file is usable
            raise
        except (UnicodeEncodeError, OverflowError) as error:
            raise BadRequest(f"An id or a number can't be stored: {error}.") from error
        except (sqlite3.Error, OSError, StoreUnavailable) as error:
            self._handle_failure(error)
            raise StoreUnavailable(self.trouble) from error

    def _connected(self) -> Connection:
        if self._db is None or self._file.has_moved():
            self._disconnect()
            self._db = self._file.open()
        return self._db

    def _handle_failure(self, error: Exception) -> None:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
        remedy = REMEDIES.get(code, "can't be used: see the server's log.")
        if isinstance(error, OSError) and error.errno in REMEDIES_BY_ERRNO:
            remedy = REMEDIES_BY_ERRNO[error.errno]
        self.trouble = f"The store of responses {remedy}"
        if isinstance(error, StoreUnavailable):
            self.trouble = error.message
        log.warning("%s: %s", self._file.path.name, public_message(error))
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if code not in TRANSIENT:
            self._disconnect()
        if code in DAMAGE:
            self._set_aside()

    def _set_aside(self) -> None:
        try:
            self._file.set_aside()
            self._retry_at = 0.0
        except OSError as error:
            log.warning("%s can't be renamed: %s", self._file.path.name, public_message(error))

    def _disconnect(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def _close_file(self) -> None:
        self._disconnect()
        self._file.servers.leave()


def reads(
    work: Callable[Concatenate[D, Connection, P], R],
) -> Callable[Concatenate[D, P], Coroutine[Any, Any, R]]:
    """Makes the method run in the store's thread, on one snapshot of the database. A call that is
    cancelled before its turn is skipped."""

    @wraps(work)
    async def call(self: D, /, *args: P.args, **kwargs: P.kwargs) -> R:
        job = partial(self._transact, READ, lambda db: work(self, db, *args, **kwargs))
        return await self._submit(job)

    return call


def writes(
    work: Callable[Concatenate[D, Connection, P], R],
) -> Callable[Concatenate[D, P], Coroutine[Any, Any, R]]:
    """Makes the method run in the store's thread, as a transaction that is on disk when the call
    returns. It is carried out even if the call is cancelled."""

    @wraps(work)
    async def call(self: D, /, *args: P.args, **kwargs: P.kwargs) -> R:
        job = partial(self._transact, WRITE, lambda db: work(self, db, *args, **kwargs))
        return await asyncio.shield(self._submit(job, _size([args, [*kwargs.values()]])))

    return call


def _size(value: object) -> int:
    """The total length of all `bytes` in an argument of a call."""
    match value:
        case bytes():
            return len(value)
        case Record():
            return len(value.body) + _size(value.output)
        case list() | tuple():  # an input may have 65,000 items
            return sum(len(v.body) if isinstance(v, ItemRecord) else _size(v) for v in value)
    return 0


def checked_size(body: bytes) -> bytes:
    if len(body) > (most := limits.STORED_PIECE_BYTES):
        raise TooLarge(
            f"An item of {len(body)} bytes is too large to be stored; the limit is {most} bytes. "
            "Send less, or send `store: false`."
        )
    return body


@contextmanager
def _transaction(db: Connection, begin: str) -> Iterator[Connection]:
    db.execute(begin)
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.rollback()
        raise


DAY = 86400.0

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
