"""The servers that share a data directory: what each of them takes, and which have ended."""

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_server.system.files import create_locked, own_path, remove_abandoned

FOLDER = "servers"
"""A folder in the data directory."""

_ID = re.compile(r"[0-9a-f]{16}")


_PUBLISHED = re.compile(rb"(\d{20}) (\d{1,9}) (\d{1,9}) (\S*)\n")


@dataclass(frozen=True)
class OtherServer:
    """What another server has published. The defaults are those of one that has just begun."""

    nbytes: int = 0
    """The bytes of memory that it takes."""
    pid: int = 0
    """The process to signal for a restart: the one that was started first."""
    generation: int = 0
    """How many servers of this process came before. Those of earlier generations are leaving."""
    url: str = ""


class Servers:
    """Each server has a file, which is locked until its process ends, however that ends."""

    def __init__(self, data_dir: Path) -> None:
        self.id = secrets.token_hex(8)
        self.pid, self.generation, self.url = os.getpid(), 0, ""
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

    def exchange(self, nbytes: int) -> Mapping[str, OtherServer]:
        """Publishes the bytes of memory that this server takes. Returns the other servers. Of two
        that publish at once, each gets the other's. Raises OSError."""
        self.join()
        assert self._file is not None
        line = f"{nbytes:020d} {self.pid} {self.generation} {self.url}\n"
        os.pwrite(self._file, line.encode(), 0)
        return self.others()

    def is_leaving(self, other: OtherServer) -> bool:
        """Whether this server has been started to take its place."""
        return other.pid == self.pid and other.generation < self.generation

    def others(self) -> Mapping[str, OtherServer]:
        """The other servers by their ids. Raises OSError."""
        try:
            files = [file for file in self._folder.iterdir() if _ID.fullmatch(file.name)]
        except FileNotFoundError:
            return {}
        return {
            file.name: _published(file)
            for file in files
            if file.name != self.id and not remove_abandoned(file)
        }


def _published(file: Path) -> OtherServer:
    with suppress(OSError):
        if line := _PUBLISHED.match(file.read_bytes()[:1024]):
            nbytes, pid, generation, url = line.groups()
            return OtherServer(
                int(nbytes), int(pid), int(generation), url.decode("ascii", "replace")
            )
    return OtherServer()
