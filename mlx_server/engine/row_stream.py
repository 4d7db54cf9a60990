"""The reports about the rows of one request, which the request takes at its own pace."""

import asyncio
from collections.abc import Callable
from copy import copy

from mlx_server.engine.messages import (
    Admitted,
    Embedded,
    Prefilled,
    PrefillProgress,
    PromptLogprobs,
    RowFailed,
    RowLeftGrammar,
    RowRefused,
    RowTurnedAway,
    Token,
)
from mlx_server.errors import EngineDied, GenerationFailed, InvalidGrammar, Overloaded, ServerError

Item = Admitted | Prefilled | PrefillProgress | PromptLogprobs | RowLeftGrammar | Token | Embedded

ITEM_BYTES = 128
"""Estimated memory of one token, or of one log probability."""


class RowStream:
    """The reports about one request's rows, until the request ends."""

    def __init__(self, unpause: Callable[["RowStream"], None] = lambda answers: None) -> None:
        """unpause: called when a paused request has taken all its items."""
        self.rows: list[int] = []
        self.unread = 0
        """Estimated bytes of the items not yet taken."""
        self.is_paused = False
        self._unpause = unpause
        self._items: list[Item] = []
        self._error: ServerError | None = None
        self._news = asyncio.Event()

    def put(self, item: Item) -> None:
        self._items.append(item)
        self.unread += _bytes(item)
        self._news.set()

    def fail(self, error: ServerError) -> None:
        self._error = error
        self._news.set()

    async def take(self) -> list[Item]:
        """Returns the items that arrived since the last call; waits for at least one."""
        await self._news.wait()
        items, self._items = self._items, []
        self.unread = 0
        if self.is_paused:
            self._unpause(self)
        if not self._error:
            self._news.clear()
        elif not items:
            raise copy(self._error)  # a shared one would collect every request's traceback
        return items


def error_of(report: RowFailed | RowRefused | RowTurnedAway) -> ServerError:
    match report:
        case RowRefused(message=message):
            return InvalidGrammar(f"The answer can't be constrained: {message}")
        case RowFailed(message=message, lost=True):
            return EngineDied(f"The answer was lost: {message}")
        case RowTurnedAway(message=message):
            return Overloaded(f"The answer can't be constrained now: {message}")
    return GenerationFailed(f"The answer could not be generated: {report.message}")


def _bytes(item: Item) -> int:
    match item:
        case Token(logprobs=logprobs):
            return ITEM_BYTES * (1 + (1 + len(logprobs.top) if logprobs else 0))
        case PromptLogprobs(logprobs=scored):
            return ITEM_BYTES * sum(1 + len(logprobs.top) for logprobs in scored)
        case Embedded(vectors=vectors):
            return sum(map(len, vectors))
    return ITEM_BYTES
