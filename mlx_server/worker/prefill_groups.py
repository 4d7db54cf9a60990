"""Makes groups of prompts that are computed together, each with what the prompt cache has of it."""

from typing import Any

import mlx.nn as nn

from mlx_server.engine.kv_cost import PREFILL_PADDING
from mlx_server.engine.messages import Prefilled
from mlx_server.worker.batch_support import one_row
from mlx_server.worker.mlx_lm_internals import greedy_sampler
from mlx_server.worker.phases import PrefillBatch
from mlx_server.worker.prefill.budget import LAST_PIECE, MOST
from mlx_server.worker.prefill.order import PromptScheduler
from mlx_server.worker.prompt_queue import (
    PrefillGroup,
    WaitingPrompt,
    begin_alike,
)
from mlx_server.worker.quantized_kv import make_caches
from mlx_server.worker.replay_model import force_tokens
from mlx_server.worker.row_cache import RowCache
from mlx_server.worker.step_bytes import padding

PromptQueue = PromptScheduler[WaitingPrompt | PrefillGroup]


def take_piece(
    first: WaitingPrompt, queue: PromptQueue, tokens: int, room: int
) -> list[WaitingPrompt]:
    """Removes the waiting prompts that fit into the same piece from the queue; returns all of the
    piece. A client whose prompt does not fit does not hold up the others: what they get is counted,
    so that it is next. room: the number of rows that may begin."""
    taken = [first]

    def fits(following: WaitingPrompt | PrefillGroup) -> bool:
        if isinstance(following, PrefillGroup) or following.decode:
            return False
        longest = max(following.left, *(waiting.left for waiting in taken))
        is_small = longest * (len(taken) + 1) <= tokens * LAST_PIECE
        lengths = [len(waiting.prompt) for waiting in (*taken, following)]
        is_small = is_small and padding(lengths) <= PREFILL_PADDING
        return is_small and not begin_alike(following, taken)

    while not first.decode and len(taken) < room and (following := queue.next(fits)):
        assert isinstance(following, WaitingPrompt)
        queue.remove(following)
        taken.append(following)
    return taken


class PrefillGroups:
    def __init__(self, model: nn.Module, cache: RowCache, *, one_at_a_time: bool) -> None:
        self._model = model
        self._cache = cache
        self._one_at_a_time = one_at_a_time

    def make(
        self, first: WaitingPrompt, queue: PromptQueue, tokens: int, room: int
    ) -> tuple[PrefillGroup, list[Prefilled]]:
        """Returns the prompts of a piece as a group, and the reports of those that begin."""
        taken = take_piece(first, queue, tokens, room)
        rest, caches, reports = [], [], []
        for waiting in taken:
            cache, cached = self._known(waiting)
            caches.append(cache)
            rest.append(waiting.prompt[cached:])
            # A cache from prompt log probabilities was computed for this row: it is no cache hit.
            if not waiting.begun:
                reports.append(Prefilled(waiting.row.number, 0 if waiting.cache else cached))
            waiting.begun = True
        return PrefillGroup(self._batch(taken, rest, caches), rest, taken[0].decode), reports

    def _known(self, waiting: WaitingPrompt) -> tuple[list[Any], int]:
        beginning = waiting.prompt[:-1]
        if waiting.cache is not None:
            cache, cached = waiting.cache, len(beginning)
        else:
            known, cached = self._cache.fetch(waiting.row, beginning)
            cache = known or make_caches(self._model)
            self._cache.add_parting(waiting.row, beginning, cached)
        if waiting.forced_tokens is not None:
            force_tokens(cache, waiting.forced_tokens, waiting.forced_from)
        return one_row(cache) if self._one_at_a_time else cache, cached

    def _batch(
        self, rows: list[WaitingPrompt], rest: list[list[int]], caches: list[list[Any]]
    ) -> PrefillBatch:
        return PrefillBatch(
            self._model,
            [waiting.row.number for waiting in rows],
            caches,
            [w.prompt[: len(w.prompt) - len(left)] for w, left in zip(rows, rest, strict=True)],
            MOST,
            [waiting.row for waiting in rows],
            greedy_sampler,
            [()] * len(rows),
            [waiting.stops for waiting in rows],
            [waiting.max_tokens for waiting in rows],
        )
