"""Limits the answers that are being generated or waiting, in total and for each client."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_server.errors import BadRequest, Overloaded

SHARE = 3
"""A client may hold at most this many times the slots that are left free. So a single client gets
three quarters of all slots, and a new client always finds some free. Network switches share their
buffers in this way, by dynamic thresholds."""


class RowSlots:
    def __init__(self, most: int) -> None:
        """most: the slots that a client can take while no other client has any."""
        self.most = most
        self.total = most + -(-most // SHARE)
        self.taken = 0
        self._taken_by: Counter[str] = Counter()

    @contextmanager
    def take(self, rows: int, client: str) -> Iterator[None]:
        """Takes a slot for each answer until the block is left. It never waits: it raises
        BadRequest for more rows than any request may have, and Overloaded for a full queue."""
        if rows > self.most:
            raise BadRequest(
                f"The request asks for {rows} answers; this server allows {self.most} in one "
                "request. Send fewer prompts, or a smaller `n`."
            )
        if not self._has_room(rows, client):
            raise Overloaded(
                f"The queue is full: {self.taken} answers are being generated or waiting, "
                f"{self._taken_by[client]} of them yours. Try again later."
            )
        self.taken += rows
        self._taken_by[client] += rows
        try:
            yield
        finally:
            self.taken -= rows
            self._taken_by[client] -= rows
            self._taken_by += Counter()  # removes the clients whose count is zero

    def _has_room(self, rows: int, client: str) -> bool:
        free, own = self.total - self.taken - rows, self._taken_by[client]
        return free >= 0 and (not own or own + rows <= SHARE * free)
