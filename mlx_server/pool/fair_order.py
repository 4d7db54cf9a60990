"""The order in which waiting clients are served: in turns, so that no client starves another."""

TURN = 64
"""The virtual time that one row takes. A grant advances the clock by at least one, so a waiting
reservation is passed by at most this many newcomers for each row that its client queued before
it."""


class FairOrder:
    """Start-time fair queueing on a virtual clock.

    A row starts when the previous row of its client has used up its time, but never before the
    clock; the row with the earliest start is served first.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._ends: dict[str, int] = {}
        """The virtual time at which each client's last row ends, if it is later than the clock."""

    def next(self, client: str, rows: int) -> int:
        """Adds rows of the client, and returns the virtual time at which they start."""
        begins = max(self._clock, self._ends.get(client, 0))
        self._ends = {who: end for who, end in self._ends.items() if end > self._clock}
        self._ends[client] = begins + TURN * rows
        return begins

    def granted(self, turn: int) -> None:
        self._clock = max(self._clock, turn) + 1
