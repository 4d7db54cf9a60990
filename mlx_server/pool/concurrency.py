"""How many answers may be under way or waiting: in total, and for each client."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_server.errors import BadRequest, Overloaded

SHARE = 3
"""A client that has answers under way may have this many times what would still be free: alone it
gets three quarters of all places, and those who come later always find some (dynamic thresholds,
as switches share their buffers)."""


class RowSlots:
    def __init__(self, most: int) -> None:
        """most: answers that a client gets which is alone."""
        self.most = most
        self.total = most + -(-most // SHARE)
        self.taken = 0
        self._of: Counter[str] = Counter()

    @contextmanager
    def take(self, rows: int, client: str) -> Iterator[None]:
        """Room for so many answers, or an error at once."""
        if rows > self.most:
            raise BadRequest(
                f"One request may ask for at most {self.most} answers here, not {rows}: "
                "send fewer prompts, or a smaller `n`."
            )
        if not self._has_room(rows, client):
            raise Overloaded(
                f"The queue is full: {self.taken} answers are under way or waiting, "
                f"{self._of[client]} of them yours."
            )
        self.taken += rows
        self._of[client] += rows
        try:
            yield
        finally:
            self.taken -= rows
            self._of[client] -= rows
            self._of += Counter()  # which forgets those that have none

    def _has_room(self, rows: int, client: str) -> bool:
        free, own = self.total - self.taken - rows, self._of[client]
        return free >= 0 and (not own or own + rows <= SHARE * free)
