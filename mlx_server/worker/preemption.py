"""Rows whose caches were freed to make room for others, and what they need to resume.

A row that had tokens keeps its sampler, its grammar and the token that it drew last. To resume, it
computes the cache of all tokens before that one, except what the prompt cache has, and then decodes
as if it had not been preempted.
"""

from dataclasses import replace
from typing import cast

from mlx_server.worker.phases import DecodeBatch
from mlx_server.worker.prompt_queue import WaitingPrompt
from mlx_server.worker.row import Row


class Preempted:
    def __init__(self) -> None:
        self._prompts: dict[int, WaitingPrompt] = {}
        """The prompts of all rows of a batch, by number."""
        self._waiting: dict[int, WaitingPrompt] = {}
        """The prompts of the preempted rows, by number."""

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    @property
    def rows(self) -> list[Row]:
        return [waiting.row for waiting in self._waiting.values()]

    def add(self, waiting: WaitingPrompt) -> None:
        self._prompts[waiting.number] = waiting

    def remove(self, number: int) -> None:
        self._prompts.pop(number, None)
        self._waiting.pop(number, None)

    def prefilling(self, number: int) -> None:
        """Preempts a row whose prompt is not fully computed; its prefill will start again."""
        prompt = replace(self._prompts[number], cache=None, known=0)
        self._prompts[number] = self._waiting[number] = prompt

    def decoding(self, one: DecodeBatch) -> None:
        """Preempts a row that decoded. one: a batch of this row alone, whose cache is dropped."""
        (number,), (tokens,) = one.uids, one.tokens
        one.prompt_cache = []
        ids = [*tokens, *cast(list[int], one._next_tokens.tolist())]
        prompt = replace(self._prompts[number], prompt=ids, cache=None, known=0, decode=one)
        self._prompts[number] = self._waiting[number] = prompt

    def decode(self, rows: list[Row]) -> None:
        """Notes that rows decode: their prompts drop the references that would keep old caches."""
        for row in rows:
            prompt = self._prompts[row.number]
            prompt.decode = prompt.cache = None

    def resumed(self, number: int) -> WaitingPrompt | None:
        return self._waiting.pop(number, None)
