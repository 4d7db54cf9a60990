"""The prompts of a batch: those that wait, and those that are computed together, each with what the
prompt cache has of it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.nn as nn

from mlx_server.engine.messages import PREFILL_PADDING, Prefilled
from mlx_server.worker.decode_groups import DecodeBatch, PrefillBatch, padding
from mlx_server.worker.kv_caches import make_caches, one_row
from mlx_server.worker.mlx_lm_internals import StopSequences, greedy_sampler
from mlx_server.worker.prefill.schedule import LAST_PIECE, MOST, PrefillPiece, PromptScheduler
from mlx_server.worker.prompt_store import RowPrompts
from mlx_server.worker.replay_model import force_tokens
from mlx_server.worker.row import Row
from mlx_server.worker.sight import sight_of

SHARED = 32
"""Prompts that share this many tokens that are not computed yet are prefilled one after the other:
the second one uses what the first one left in the prompt cache."""


@dataclass
class WaitingPrompt:
    """A row whose prefill has not begun, or begins again after a preemption."""

    row: Row
    prompt: list[int]
    """The request's, and after a preemption all of the row's tokens."""
    cache: list[Any] | None
    """The cache of the whole prompt but its last token, if it was computed before."""
    known: int
    """The number of its tokens that were in the prompt cache when it arrived."""
    begun: bool = False
    """Whether its prefill has begun before, so that `Prefilled` was reported."""
    decode: DecodeBatch | None = None
    """The state of a preempted row, which continues once the cache of `prompt`, all its tokens so
    far, is computed again."""

    def __post_init__(self) -> None:
        row, self.rows = self.row, [self.row]
        self.client, self.number, self.tier = row.client, row.number, row.tier

    @property
    def left(self) -> int:
        return len(self.prompt) - self.known

    def may_share_more(self, tokens: list[int]) -> bool:
        """Whether a prompt with these tokens may begin with more of its own than are known."""
        beginning, following = slice(SHARED), slice(self.known, self.known + 1)
        own = self.prompt
        return tokens[beginning] == own[beginning] and tokens[following] == own[following]

    @property
    def padded_left(self) -> int:
        """The tokens that pieces compute, without the last one."""
        return self.left - 1

    @property
    def context(self) -> int:
        return self.known

    @property
    def is_alone(self) -> bool:
        """Whether its pieces have no room for other prompts."""
        sees_last = _sees_last(self.row, len(self.prompt))
        return self.decode is not None or self.row.deterministic or sees_last


class PrefillGroup:
    """Rows whose prompts are computed together, piece by piece."""

    def __init__(
        self,
        batch: PrefillBatch,
        rest: list[list[int]],
        resumed: DecodeBatch | None = None,
        heads: Collection[int] = (),
    ) -> None:
        """resumed: the decoding state of the group's one row if that was preempted. heads: those of
        the model if the last piece also computes the last tokens."""
        self.batch = batch
        self.resumed = resumed
        self._heads = () if resumed or self.rows[0].deterministic else heads
        self.rest = rest
        """The tokens of each row that are not computed yet. Its last one stays here: decoding
        begins with it."""
        self._begun = False
        """Whether a piece of it is computed."""
        self.client, self.number = self.rows[0].client, self.rows[0].number
        self.tier = self.rows[0].tier

    @property
    def rows(self) -> list[Row]:
        return self.batch.samplers

    @property
    def left(self) -> int:
        return sum(map(len, self.rest))

    @property
    def padded_left(self) -> int:
        return len(self.rest) * (max(map(len, self.rest)) - 1)

    @property
    def context(self) -> int:
        return max(map(len, self.batch.tokens))

    def compute(self, tokens: int, ends: Callable[[PrefillPiece], bool]) -> list[int]:
        """Computes about `tokens` tokens of all rows together; returns how many of each row. ends:
        whether a last piece computes the last tokens too."""
        size = max(1, tokens // len(self.rest))
        longest = max(map(len, self.rest)) - 1
        if not self._begun and longest < min(size * LAST_PIECE, MOST):
            size = longest  # so that prompts that were to fit need no second piece
        self._begun = True
        sizes = [
            min(_wanted(row, len(known), size), len(rest) - 1)
            for row, known, rest in zip(self.rows, self.batch.tokens, self.rest, strict=True)
        ]
        piece = PrefillPiece(len(sizes), max(sizes) + 1, self.context)
        is_last = all(n == len(rest) - 1 for n, rest in zip(sizes, self.rest, strict=True))
        if max(sizes) and self._heads and is_last and ends(piece):
            self.batch.end(self.rest, self._heads)
            self.rest = [rest[-1:] for rest in self.rest]
        elif max(sizes):
            if _sees_last(self.rows[0], len(self.batch.tokens[0]) + len(self.rest[0])):
                self.batch.prompt_and_last(self.rest[0])
            else:
                self.batch.prompt([rest[:n] for rest, n in zip(self.rest, sizes, strict=True)])
            self.rest = [rest[n:] for rest, n in zip(self.rest, sizes, strict=True)]
            self._renew_states()
        return sizes

    def encode_picture(self, is_over: Callable[[], bool]) -> bool:
        """Computes some of the tower for a picture that a next piece has. False if there is nothing
        to compute. is_over: whether other rows should get a token."""
        sight = sight_of(self.batch.model)
        pairs = zip(self.rows, self.batch.tokens, strict=True) if sight else ()
        return any(
            sight.encode(row.pictures, len(known), is_over)
            for row, known in pairs
            if sight and row.pictures
        )

    def _renew_states(self) -> None:
        row, computed = self.rows[0], len(self.batch.tokens[0])
        if row.deterministic and row.reusable(computed) == computed:
            self.batch.renew_states()

    @property
    def has_ended(self) -> bool:
        """Whether its last piece has computed the last tokens too."""
        return self.batch.logits is not None

    @property
    def is_computed(self) -> bool:
        return all(len(rest) == 1 for rest in self.rest)

    def decode(self) -> DecodeBatch:
        if self.resumed is None:
            return self.batch.decode([rest[0] for rest in self.rest])
        self.resumed.prompt_cache = self.batch.prompt_cache
        return self.resumed

    def cancel(self, number: int) -> None:
        at = self.batch.uids.index(number)
        self.rest.pop(at)
        self.batch.filter([i for i in range(len(self.batch)) if i != at])


def _sees_last(row: Row, length: int) -> bool:
    """Whether the tokens before the last one of so many see it, so that one pass computes all."""
    return row.pictures is not None and row.pictures.is_within(length - 1)


def _wanted(row: Row, known: int, size: int) -> int:
    if row.deterministic:
        size = row.next_piece(known)
    else:
        # a piece has one new picture, so that other rows wait for one at a time
        pictures = row.pictures.ends if row.pictures else []
        size = min(size, _next_end(row.snapshot_places, known), _next_end(pictures, known))
    return row.pictures.piece(known, size) if row.pictures else size


def _next_end(ends: Sequence[int], known: int) -> int:
    return next((end - known for end in ends if end > known), MOST)


def share_new_tokens(a: WaitingPrompt, b: WaitingPrompt) -> bool:
    end = max(a.known, b.known) + SHARED
    beginning = a.prompt[:end]
    return len(beginning) == end and beginning == b.prompt[:end]


PromptQueue = PromptScheduler[WaitingPrompt | PrefillGroup]


def take_piece(
    first: WaitingPrompt, queue: PromptQueue, tokens: int, room: int
) -> list[WaitingPrompt]:
    """Removes the waiting prompts that fit into the same piece from the queue; returns all of the
    piece. A client whose prompt does not fit does not hold up the others: what they get is counted,
    so that it is next. room: the number of rows that may begin."""
    prompts = [first]

    def fits(following: WaitingPrompt | PrefillGroup) -> bool:
        if isinstance(following, PrefillGroup) or following.is_alone:
            return False
        if following.tier is not first.tier:
            return False
        longest = max(following.left, *(waiting.left for waiting in prompts))
        is_small = longest * (len(prompts) + 1) <= tokens * LAST_PIECE
        lengths = [len(waiting.prompt) for waiting in (*prompts, following)]
        is_small = is_small and padding(lengths) <= PREFILL_PADDING
        return is_small and not any(share_new_tokens(following, waiting) for waiting in prompts)

    while not first.is_alone and len(prompts) < room and (following := queue.next(fits)):
        assert isinstance(following, WaitingPrompt)
        queue.remove(following)
        prompts.append(following)
    return prompts


class PrefillGroups:
    def __init__(
        self, model: nn.Module, cache: RowPrompts, heads: Collection[int], *, one_at_a_time: bool
    ) -> None:
        """heads: see `PrefillGroup`."""
        self._model = model
        self._heads = heads
        self._cache = cache
        self._one_at_a_time = one_at_a_time

    def make(
        self, first: WaitingPrompt, queue: PromptQueue, tokens: int, room: int
    ) -> tuple[PrefillGroup, list[Prefilled]]:
        """Returns the prompts of a piece as a group, and the reports of those that begin."""
        prompts = take_piece(first, queue, tokens, room)
        rest, caches, reports = [], [], []
        for waiting in prompts:
            cache, cached = self._known(waiting)
            caches.append(cache)
            rest.append(waiting.prompt[cached:])
            # A cache from prompt log probabilities was computed for this row: it is no cache hit.
            if not waiting.begun:
                reports.append(Prefilled(waiting.row.number, 0 if waiting.cache else cached))
            waiting.begun = True
        batch = self._batch(prompts, rest, caches)
        return PrefillGroup(batch, rest, prompts[0].decode, self._heads), reports

    def _known(self, waiting: WaitingPrompt) -> tuple[list[Any], int]:
        beginning = waiting.prompt[:-1]
        if waiting.cache is not None:
            cache, cached = waiting.cache, len(beginning)
        else:
            known, cached = self._cache.fetch(waiting.row, beginning)
            cache = known or make_caches(self._model)
            self._cache.add_parting(waiting.row, beginning, cached)
        request = waiting.row.request
        if request.forced_tokens is not None:
            force_tokens(cache, request.forced_tokens, len(request.prompt))
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
            [_stop_sequences(tuple(waiting.row.request.stop_tokens)) for waiting in rows],
            [waiting.row.tokens_left for waiting in rows],
        )


@lru_cache(maxsize=256)
def _stop_sequences(tokens: tuple[int, ...]) -> StopSequences:
    return StopSequences([[token] for token in tokens])
