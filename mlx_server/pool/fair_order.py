"""In which order clients are served that wait: by turns, so that one of them keeps nobody out."""

TURN = 64
"""What a row adds to its client's time; each grant moves the clock by one, so that a reservation
is passed by no more newcomers than this for each row before it."""


class FairOrder:
    """Start-time fair queueing: a row begins when the row before it of the same client has had its
    time, and not before the clock; the earliest is served first."""

    def __init__(self) -> None:
        self._clock = 0
        self._ends: dict[str, int] = {}
        """Of each client that is ahead of the clock, when its last row has had its time."""

    def next(self, client: str, rows: int) -> int:
        begins = max(self._clock, self._ends.get(client, 0))
        self._ends = {who: end for who, end in self._ends.items() if end > self._clock}
        self._ends[client] = begins + TURN * rows
        return begins

    def granted(self, turn: int) -> None:
        self._clock = max(self._clock, turn) + 1
