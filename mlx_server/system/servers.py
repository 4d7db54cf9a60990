"""The servers that share a data directory: what each of them takes, and which have ended."""

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mlx_server.system.files import create_locked, own_path, remove_abandoned

FOLDER = "servers"
"""A folder in the data directory."""

_ID = re.compile(r"[0-9a-f]{16}")


class Servers:
    """Each server has a file, which is locked until its process ends, however that ends."""

    def __init__(self, data_dir: Path) -> None:
        self.id = secrets.token_hex(8)
        self._folder = data_dir / FOLDER
        self._file: int | None = None

    def join(self) -> None:
        """Makes the file of this server, unless it is there. Raises OSError."""
        if self._file is not None and os.fstat(self._file).st_nlink:
            return
        self.leave()
        self._folder = own_path(self._folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = create_locked(self._folder / self.id)

    def leave(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                (self._folder / self.id).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def exchange(self, nbytes: int) -> Mapping[str, int]:
        """Publishes the bytes of memory that this server takes. Returns those of each other
        server. Of two that publish at once, each gets the other's. Raises OSError."""
        self.join()
        assert self._file is not None
        os.pwrite(self._file, b"%020d" % nbytes, 0)
        return self.others()

    def others(self) -> Mapping[str, int]:
        """The bytes of memory that each other server takes, by its id. Raises OSError."""
        try:
            files = [file for file in self._folder.iterdir() if _ID.fullmatch(file.name)]
        except FileNotFoundError:
            return {}
        return {
            file.name: _published(file)
            for file in files
            if file.name != self.id and not remove_abandoned(file)
        }


def _published(file: Path) -> int:
    with suppress(OSError, ValueError):
        return int(file.read_bytes()[:20])
    return 0
