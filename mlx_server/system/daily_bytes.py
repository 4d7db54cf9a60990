"""The bytes that all processes which use a folder write there in a day: an SSD wears out."""

import fcntl
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_server.system.files import LOCKED, lock_within, read_regular

FILE = "written"
LOCK_SECONDS = 1.0

_COUNT = re.compile(rb"(\d{4}-\d\d-\d\d) (\d{20})\n")


@dataclass(frozen=True, slots=True)
class DailyBytes:
    folder: Path
    most: int
    """The limit in bytes."""

    @property
    def today(self) -> int:
        with suppress(OSError):
            return _counted(read_regular(self.folder / FILE))
        return 0

    def take(self, nbytes: int) -> bool:
        """Counts the bytes, unless they would be more than the limit or another program keeps the
        file locked. Raises OSError."""
        file = os.open(self.folder / FILE, LOCKED, 0o600)
        try:
            if not lock_within(LOCK_SECONDS, file, fcntl.LOCK_EX):
                return False
            total = _counted(os.pread(file, 64, 0)) + nbytes
            if total > self.most:
                return False
            os.pwrite(file, f"{_day()} {total:020}\n".encode(), 0)
            return True
        finally:
            os.close(file)


def _counted(content: bytes) -> int:
    """The bytes of this day; 0 if the file has another day's."""
    count = _COUNT.match(content)
    return int(count[2]) if count and count[1].decode() == _day() else 0


def _day() -> str:
    return time.strftime("%Y-%m-%d")
