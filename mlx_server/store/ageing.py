"""The clock by which old records are removed; it distrusts sudden jumps of the system clock."""

import math
import time
from collections.abc import Callable
from sqlite3 import Connection

DAY = 86400.0

LEAP_SECONDS = 366 * DAY
"""A clock that is this far ahead of its last reading is more likely wrong than right, for example
because of an empty battery or a wrong time server."""

DOUBT_SECONDS = DAY / 4
"""The time that such a clock must stay ahead, with the server running, before it is trusted."""

NEVER = -math.inf


class AgeClock:
    def __init__(
        self, clock: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._steady = steady
        self._doubted_since: float | None = None

    def now(self, db: Connection) -> float:
        """Returns the time, or `NEVER` while the clock is in doubt, so that no record is old then.

        A clock that was set back makes no record older and is trusted at once.
        """
        now, steady = self._clock(), self._steady()
        seen = _last_time(db)
        if seen is None or now - seen < LEAP_SECONDS:
            self._doubted_since = None
        elif self._doubted_since is None:
            self._doubted_since = steady
        if self._doubted_since is not None and steady - self._doubted_since < DOUBT_SECONDS:
            return NEVER
        _store_time(db, now)
        return now


def _last_time(db: Connection) -> float | None:
    """The time of the latest pruning; before the first one, that of the first stored record."""
    row = db.execute("SELECT at FROM seen").fetchone()
    row = row or db.execute("SELECT used_at FROM records ORDER BY seq LIMIT 1").fetchone()
    return float(row[0]) if row else None


def _store_time(db: Connection, now: float) -> None:
    db.execute("DELETE FROM seen")
    db.execute("INSERT INTO seen VALUES (?)", (now,))
