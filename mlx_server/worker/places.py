"""Decides who may begin while others decode: a batch has places for a number of rows."""

from collections import Counter

from mlx_server.worker.decode_groups import DecodeGroups
from mlx_server.worker.prompt_queue import PrefillGroup, WaitingPrompt


class Places:
    def __init__(self, count: int, decoding: DecodeGroups) -> None:
        self._count = count
        self._decoding = decoding
        self.kept = Counter[str]()
        """The rows that wait for their masks, by client: its further rows don't take their places,
        and where there is only one place, no row does."""

    @property
    def free(self) -> int:
        """The number of places that no decoding row has."""
        return self._count - len(self._decoding)

    def fit(self, waiting: WaitingPrompt | PrefillGroup) -> bool:
        kept = self.kept.total() if self._count == 1 else self.kept[waiting.client]
        return len(waiting.rows) <= self.free - kept

    def may_begin(self, waiting: WaitingPrompt | PrefillGroup) -> bool:
        return self.fit(waiting) or self.yielding(waiting) is not None

    def yielding(self, waiting: WaitingPrompt | PrefillGroup) -> int | None:
        """Returns the row to set aside for a client that has none: the youngest of the client with
        the most rows, if that one has several.

        So a model that is computed one row at a time finishes its row first: taking turns would
        copy a row's whole cache each time, and keep two caches where one is reserved.
        """
        decoding = Counter(row.client for row in self._decoding.rows)
        ((client, rows),) = decoding.most_common(1) or [("", 0)]
        if rows < 2 or waiting.client in decoding or len(waiting.rows) > 1:
            return None
        return max(row.number for row in self._decoding.rows if row.client == client)
