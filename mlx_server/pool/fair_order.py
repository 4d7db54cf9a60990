"""The order in which waiting clients are served: by turns, so that no client starves another."""

TURN = 64
"""The virtual time that one row takes. Each grant advances the clock by one, so at most this many
newcomers pass a reservation for each row of its client that is queued before it."""


class FairOrder:
    """Start-time fair queueing on a virtual clock.

    A row starts when the previous row of its client has used up its time, but never before the
    clock; the row with the earliest start is served first.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._ends: dict[str, int] = {}
        """The time at which the client's latest row ends, for each client ahead of the clock."""

    def next(self, client: str, rows: int) -> int:
        begins = max(self._clock, self._ends.get(client, 0))
        self._ends = {who: end for who, end in self._ends.items() if end > self._clock}
        self._ends[client] = begins + TURN * rows
        return begins

    def granted(self, turn: int) -> None:
        self._clock = max(self._clock, turn) + 1
