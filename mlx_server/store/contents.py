"""The contents of files and batches: a folder next to the database, whose records name them.

Names are the server's own ids, never a client's. A content is locked while it is being made, until
its record is stored: what is neither locked nor named by a record was left by a server that ended.
"""

import fcntl
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mlx_server.system.files import (
    create_locked,
    lock_abandoned,
    open_regular,
    own_path,
    remove_abandoned,
)

FOLDER = "files"
"""A folder in the data directory."""


class Contents:
    """Each method raises OSError if the folder can't be used."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self._folder = data_dir / FOLDER

    def create(self, name: str) -> BinaryIO:
        """A new content, locked until it is closed."""
        path = self._path(name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.fdopen(create_locked(path), "w+b")

    def resume(self, name: str) -> BinaryIO:
        """The content for appending to it, new or as another process left it. Raises
        BlockingIOError while that process has it."""
        path = self._path(name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            file.close()
            raise
        return file

    def open(self, name: str) -> BinaryIO:
        return open_regular(self._path(name), is_own=True)

    def share(self, name: str, other: str) -> BinaryIO:
        """Gives a content a second name, under which it stays when the first one is removed. It is
        locked until the returned file is closed."""
        file = self.open(name)
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            os.link(self._path(name), self._path(other))
        except BaseException:
            file.close()
            raise
        return file

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            with suppress(OSError):
                self._path(name).unlink()

    def unlocked(self) -> list[str]:
        """The names of all that no process is making."""
        with suppress(FileNotFoundError):
            return [each.name for each in self._folder.iterdir() if not _is_locked(each)]
        return []

    def remove_unlocked(self, names: Collection[str]) -> None:
        for name in names:
            with suppress(OSError):
                remove_abandoned(self._path(name))

    def _path(self, name: str) -> Path:
        assert Path(name).name == name
        return own_path(self._folder) / name


def _is_locked(path: Path) -> bool:
    try:
        os.close(lock_abandoned(path))
    except OSError:
        return True
    return False
