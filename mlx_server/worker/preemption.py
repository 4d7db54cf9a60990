"""Rows that gave their caches back, for others to grow, and what they need to go on as before.

A row that had tokens keeps its sampler, its grammar and the token that it drew last. Going on, it
computes the cache of all tokens before that one, as far as the prompt cache does not have it, and
decodes as if it had never been away.
"""

from dataclasses import replace
from typing import cast

from mlx_server.worker.phases import DecodeBatch
from mlx_server.worker.prompt_queue import WaitingPrompt
from mlx_server.worker.sampling import Row


class Preempted:
    def __init__(self) -> None:
        self._asked: dict[int, WaitingPrompt] = {}
        """Of all rows of a batch, by number."""
        self._waiting: dict[int, WaitingPrompt] = {}
        """Those that are preempted."""

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    @property
    def rows(self) -> list[Row]:
        return [waiting.row for waiting in self._waiting.values()]

    def came(self, waiting: WaitingPrompt) -> None:
        self._asked[waiting.number] = waiting

    def left(self, number: int) -> None:
        self._asked.pop(number, None)
        self._waiting.pop(number, None)

    def prefilling(self, number: int) -> None:
        """It has been computed in part, or not at all, and begins anew."""
        asked = replace(self._asked[number], cache=None, known=0)
        self._asked[number] = self._waiting[number] = asked

    def decoding(self, one: DecodeBatch) -> None:
        """The row alone, whose cache is not needed any more."""
        (number,), (tokens,) = one.uids, one.tokens
        one.prompt_cache = []
        prompt = [*tokens, *cast(list[int], one._next_tokens.tolist())]
        asked = replace(self._asked[number], prompt=prompt, cache=None, known=0, decode=one)
        self._asked[number] = self._waiting[number] = asked

    def decode(self, rows: list[Row]) -> None:
        """What they went on with would keep the caches that they came with."""
        for row in rows:
            asked = self._asked[row.number]
            asked.decode = asked.cache = None

    def resumed(self, number: int) -> WaitingPrompt | None:
        return self._waiting.pop(number, None)
