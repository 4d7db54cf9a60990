"""The SQLite file: its schema, and how it is opened, locked and, if it is damaged, renamed."""

import fcntl
import logging
import os
import sqlite3
import time
from pathlib import Path
from sqlite3 import Connection
from typing import Any

import msgspec

from mlx_server.errors import StoreUnavailable
from mlx_server.store import usage
from mlx_server.system.files import own_path

log = logging.getLogger("mlx_server.store")

VERSION = 3

BUSY_SECONDS = 2.0
"""How long a call waits for another process, for example `mlx-server store`, to finish writing."""

PRAGMAS = (
    # lets pruning shrink the file; it has an effect only before the first table is created
    "PRAGMA auto_vacuum = INCREMENTAL",
    "PRAGMA synchronous = FULL",
    # on macOS, fsync alone leaves the data in the drive's own cache
    "PRAGMA fullfsync = ON",
    "PRAGMA checkpoint_fullfsync = ON",
    "PRAGMA journal_size_limit = 67108864",
)

SCHEMA = (
    """CREATE TABLE records (
        seq INTEGER PRIMARY KEY,
        kind TEXT NOT NULL CHECK (kind IN ('response', 'conversation', 'completion')),
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        created_at REAL NOT NULL,
        used_at REAL NOT NULL,
        status TEXT NOT NULL,
        previous TEXT,
        conversation TEXT,
        labels TEXT,
        body BLOB NOT NULL,
        UNIQUE (id, owner, kind)
    )""",
    "CREATE INDEX by_age ON records (kind, used_at)",
    "CREATE INDEX running ON records (status) WHERE status IN ('queued', 'in_progress')",
    # all items have output = 0 but the output of a response
    """CREATE TABLE items (
        seq INTEGER PRIMARY KEY,
        record INTEGER NOT NULL REFERENCES records ON DELETE CASCADE,
        output INTEGER NOT NULL,
        id TEXT NOT NULL,
        body BLOB NOT NULL,
        UNIQUE (id, record, output)
    )""",
    "CREATE INDEX in_order ON items (record, output)",
    """CREATE TABLE events (
        record INTEGER NOT NULL REFERENCES records ON DELETE CASCADE,
        number INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (record, number)
    ) WITHOUT ROWID""",
    # the time of the last pruning, as a trusted clock had it
    "CREATE TABLE seen (at REAL NOT NULL)",
    *usage.SCHEMA,
)

INTERRUPTED = {
    "code": "server_error",
    "message": "The server stopped before this response was finished. Send the request again.",
}


class SharedFile:
    """A file that a server may have open, and to which all repairs are left."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Connection:
        return open_database(self.path)

    def set_aside(self) -> None:
        pass

    def close(self) -> None:
        pass


class OwnedFile(SharedFile):
    """The file of this server, which locks it until `close` or the end of the process."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lock: int | None = None
        self._interrupted_failed = False

    def open(self) -> Connection:
        _make_folder(self.path.parent)
        if self._lock is None:
            self._lock = _lock(self.path.with_name(self.path.name + ".lock"))
        db = open_database(self.path)
        try:
            if not self._interrupted_failed:  # later, running responses are this server's
                _fail_interrupted(db)
                self._interrupted_failed = True
        except BaseException:
            db.close()
            raise
        return db

    def set_aside(self) -> None:
        """Renames the three files of a damaged database, but keeps their endings, so that SQLite's
        tools can open it."""
        stamp = time.strftime("%Y%m%dT%H%M%S") + f"-{time.time_ns() % 10**9:09}"
        aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}")
        for ending in ("-wal", "-shm", ""):
            file = self.path.with_name(self.path.name + ending)
            if file.exists():
                file.rename(aside.with_name(aside.name + ending))
        log.error("%s is damaged and was renamed to %s", self.path.name, aside.name)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def open_database(path: Path) -> Connection:
    path = own_path(path)  # SQLite itself follows links to the file, and none to its "-wal"
    if not path.exists():
        path.touch(mode=0o600)
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        _prepare(db)
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: Connection) -> None:
    version = _one(db, "PRAGMA user_version")
    if version not in (0, VERSION):
        raise StoreUnavailable(
            f"The store of responses was written by another version of mlx-server (format "
            f"{version}, not {VERSION}). Use that version, or name another folder by "
            "MLX_SERVER_DATA."
        )
    for pragma in PRAGMAS:
        db.execute(pragma).fetchall()
    mode = _one(db, "PRAGMA journal_mode = WAL")
    if mode != "wal":
        raise StoreUnavailable(
            "The store of responses is on a file system where SQLite can't use WAL (it uses "
            f"{mode}). Put the data directory on a local disk."
        )
    db.execute("PRAGMA foreign_keys = ON")
    if version != VERSION:
        _create(db)


def _create(db: Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    if not _one(db, "PRAGMA user_version"):  # no other process was faster
        for statement in SCHEMA:
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")


def _one(db: Connection, pragma: str) -> Any:
    return db.execute(pragma).fetchone()[0]


def _fail_interrupted(db: Connection) -> None:
    running = db.execute(
        "SELECT seq, body FROM records WHERE status IN ('queued', 'in_progress')"
    ).fetchall()
    if not running:
        return
    db.execute("BEGIN IMMEDIATE")
    for seq, body in running:
        row = (_failed(body), seq)
        db.execute("UPDATE records SET status = 'failed', body = ? WHERE seq = ?", row)
    db.execute("COMMIT")
    log.warning("responses interrupted by the last stop and now marked failed: %d", len(running))


def _failed(body: bytes) -> bytes:
    try:
        response = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:  # a damaged body must not keep the server from starting
        response = {}
    return msgspec.json.encode(response | {"status": "failed", "error": INTERRUPTED})


def _lock(path: Path) -> int:
    """Locks a file, and returns its descriptor. The kernel releases the lock when the process
    ends."""
    lock = os.open(own_path(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise
        raise StoreUnavailable(
            "The store of responses is in use by another mlx-server. "
            "Stop that server, or set MLX_SERVER_DATA to another folder for this one."
        ) from error
    return lock


def _make_folder(folder: Path) -> None:
    """Creates the folder and syncs each parent, since SQLite syncs only the folder of its files."""
    if folder.exists():
        return
    _make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
