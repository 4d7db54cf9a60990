"""The clock by which old records are removed. It distrusts jumps of the system clock."""

import math
import time
from collections.abc import Callable
from sqlite3 import Connection

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
