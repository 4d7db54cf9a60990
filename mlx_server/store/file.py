"""The SQLite file, which several servers may have open: its schema, and how it is opened and, if it
is damaged, renamed."""

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from mlx_server.errors import StoreUnavailable
from mlx_server.store import usage
from mlx_server.system.files import LOCKED, lock_within, own_path, sync
from mlx_server.system.servers import Servers

log = logging.getLogger("mlx_server.store")

VERSION = 6

BUSY_SECONDS = 5.0
"""How long a call waits for another server to finish writing."""

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
    # of a running response or batch: the id of its server; of a response also whether a client of
    # another one cancels it
    """CREATE TABLE records (
        seq INTEGER PRIMARY KEY,
        kind TEXT NOT NULL
            CHECK (kind IN ('response', 'conversation', 'completion', 'page conversation',
                'file', 'batch', 'message batch', 'fine-tuning job')),
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        created_at REAL NOT NULL,
        used_at REAL NOT NULL,
        status TEXT NOT NULL,
        previous TEXT,
        conversation TEXT,
        labels TEXT,
        body BLOB NOT NULL,
        server TEXT,
        cancelled INTEGER NOT NULL DEFAULT 0,
        UNIQUE (id, owner, kind)
    )""",
    "CREATE INDEX by_age ON records (kind, used_at)",
    "CREATE INDEX of_owner ON records (kind, owner)",
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


class StoreFile:
    def __init__(self, path: Path, servers: Servers) -> None:
        self.path, self.servers = path, servers
        self._opened: os.stat_result | None = None

    def open(self) -> Connection:
        _make_folder(self.path.parent)
        self.servers.join()
        with self._alone():
            path = own_path(self.path)  # SQLite follows links to the file, and none to its "-wal"
            if not path.exists():
                path.touch(mode=0o600)
            self._opened = path.stat()
            return open_database(path)

    def has_moved(self) -> bool:
        """Whether the file was deleted or replaced, after which all that is written to the open one
        would be lost."""
        assert self._opened is not None
        try:
            return not os.path.samestat(self.path.stat(), self._opened)
        except FileNotFoundError:
            return True

    def set_aside(self) -> None:
        """Renames the three files of a damaged database, but keeps their endings, so that SQLite's
        tools can open it. Does nothing if another server has done it."""
        with self._alone():
            if self._opened is None or self.has_moved():
                return
            stamp = time.strftime("%Y%m%dT%H%M%S") + f"-{time.time_ns() % 10**9:09}"
            aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}")
            for ending in ("-wal", "-shm", ""):
                file = self.path.with_name(self.path.name + ending)
                if file.exists():
                    file.rename(aside.with_name(aside.name + ending))
        log.error("%s is damaged and was renamed to %s", self.path.name, aside.name)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other servers from making, opening or renaming the file meanwhile."""
        lock = os.open(own_path(self.path.with_name(self.path.name + ".lock")), LOCKED, 0o600)
        try:
            if not lock_within(BUSY_SECONDS, lock, fcntl.LOCK_EX):
                raise StoreUnavailable(
                    "The store of responses is being opened by another mlx-server. Try again, or "
                    "set MLX_SERVER_DATA to another folder for this one."
                )
            yield
        finally:
            os.close(lock)


def open_database(path: Path) -> Connection:
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
    if not version:
        db.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")


def _one(db: Connection, pragma: str) -> Any:
    return db.execute(pragma).fetchone()[0]


def _make_folder(folder: Path) -> None:
    """Creates the folder and syncs each parent, since SQLite syncs only the folder of its files."""
    if folder.exists():
        return
    _make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    sync(folder.parent)
