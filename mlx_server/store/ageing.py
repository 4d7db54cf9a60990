"""What time it is, for the removal of what is old: clocks are set wrong, and then right again."""

import math
import time
from collections.abc import Callable
from sqlite3 import Connection

DAY = 86400.0

LEAP_SECONDS = 366 * DAY
"""A clock that is this far ahead of what it said last is more likely wrong than right: an empty
battery, a mistaken time server."""

DOUBT_SECONDS = DAY / 4
"""How long it has to stay there, with the server running, to be believed."""

NEVER = -math.inf


class AgeClock:
    def __init__(
        self, clock: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._steady = steady
        self._doubted_since: float | None = None

    def now(self, db: Connection) -> float:
        """`NEVER` while the clock is in doubt: nothing is old then.

        A clock that goes back makes nothing older, and is believed at once.
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
    """Without a pruning before, the time of what was stored first: that can't be from later on."""
    row = db.execute("SELECT at FROM seen").fetchone()
    row = row or db.execute("SELECT used_at FROM records ORDER BY seq LIMIT 1").fetchone()
    return float(row[0]) if row else None


def _store_time(db: Connection, now: float) -> None:
    db.execute("DELETE FROM seen")
    db.execute("INSERT INTO seen VALUES (?)", (now,))
