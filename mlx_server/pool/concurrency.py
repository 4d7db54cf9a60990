"""Limits on the answers that may be generated or waiting, in total and for each client."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_server.errors import BadRequest, Overloaded

SHARE = 3
"""A client may hold at most this many times the slots that would still be free. A single client
gets three quarters of all slots, and a new client always finds some free (this is the dynamic
threshold scheme by which network switches share their buffers)."""


class RowSlots:
    def __init__(self, most: int) -> None:
        """most: the answers that a client can have while no other client has any."""
        self.most = most
        self.total = most + -(-most // SHARE)
        self.taken = 0
        self._of: Counter[str] = Counter()

    @contextmanager
    def take(self, rows: int, client: str) -> Iterator[None]:
        """Reserves slots for this many answers; raises BadRequest or Overloaded at once."""
        if rows > self.most:
            raise BadRequest(
                f"The request asks for {rows} answers; this server allows {self.most} in one "
                "request. Send fewer prompts, or a smaller `n`."
            )
        if not self._has_room(rows, client):
            raise Overloaded(
                f"The queue is full: {self.taken} answers are being generated or waiting, "
                f"{self._of[client]} of them yours. Try again later."
            )
        self.taken += rows
        self._of[client] += rows
        try:
            yield
        finally:
            self.taken -= rows
            self._of[client] -= rows
            self._of += Counter()  # adding an empty Counter removes the clients with zero

    def _has_room(self, rows: int, client: str) -> bool:
        free, own = self.total - self.taken - rows, self._of[client]
        return free >= 0 and (not own or own + rows <= SHARE * free)
