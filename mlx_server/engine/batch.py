"""The rows of one model: the two halves of mlx-lm's BatchGenerator, on a schedule of our own.

BatchGenerator prefills up to eight prompts together, so that nobody gets a token before all are
done, and samples row by row. Here prompts are prefilled in the order they came, in pieces that the
`Pace` sizes, and one `Sampler` chooses for all rows at once. The row objects travel through
mlx-lm's batches as its per-row "samplers", so they are merged and filtered with the caches, and
with them goes the adapter of each row.
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    GenerationBatch,
    PromptProcessingBatch,
    StopSequences,
)
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from mlx_server.engine.guide import Guide
from mlx_server.engine.messages import Generate, Logprobs, Prefilled, RowFailed, Token
from mlx_server.engine.pace import Cycle, Pace
from mlx_server.engine.prompt_cache import PromptCache, cache_key
from mlx_server.engine.replay import ReplayModel, follow
from mlx_server.engine.sampling import Row, RowLogprobs, Sampled, Sampler, one_by_one
from mlx_server.lora.slots import BASE, Rows, Use, using

PIECE = 2048
"""mlx-lm cuts longer pieces than this; the pace never asks for one."""

LAST_PIECE = 1.5
"""So many times as long as other pieces, the last of a prompt may be: a short one wastes time."""

PER_ROW = (
    *("uids", "tokens", "samplers", "logits_processors", "max_tokens", "stop_sequences"),
    *("_next_logprobs", "_token_context", "_num_tokens", "_matchers"),
)
"""What mlx-lm keeps in a list with an entry for each row."""

SHARED = 32
"""Two prompts that begin with so many equal tokens are prefilled one after the other, the second
from what the first left in the prompt cache."""


class Decode(GenerationBatch):
    # of mlx-lm's own state, what is read here
    uids: list[int]
    tokens: list[list[int]]
    samplers: list[Row]
    prompt_cache: list[Any]
    _next_tokens: mx.array
    _next_logprobs: list[RowLogprobs | None]

    _made: tuple[Sampler, Rows] | None = None

    def _step(self) -> tuple[list[int], list[Logprobs | None]]:
        inputs, logprobs = self._next_tokens, self._next_logprobs
        self._current_tokens, self._current_logprobs = inputs, logprobs

        sampler, rows = self._for_rows()
        with using(rows):
            logits = self.model(inputs[:, None], cache=self.prompt_cache)[:, -1, :]
        faults = [row.fault for row in self.samplers]
        sampled = self._sampled(sampler, logits, inputs)
        self._next_tokens, self._next_logprobs = sampled.tokens, sampled.logprobs
        mx.async_eval(*sampled.pending)

        # Reading the previous step's tokens overlaps with computing this one's.
        ids = cast(list[int], inputs.tolist())
        for tokens, token in zip(self.tokens, ids, strict=True):
            tokens.append(token)
        for row, fault in zip(self.samplers, faults, strict=True):
            row.error = fault()
        return ids, [entry.read() if entry else None for entry in logprobs]

    def _sampled(self, sampler: Sampler, logits: mx.array, inputs: mx.array) -> Sampled:
        caps = None
        if sampler.guided:
            mx.async_eval(logits)  # the caps are made meanwhile
            caps = sampler.caps(inputs, logits.shape[-1])
        try:
            return sampler(logits, inputs, caps)
        except Exception:
            return one_by_one(self.samplers, logits, inputs, caps)

    def part(self, at: int) -> "Decode":
        """One row, which leaves with all that it has."""
        one: Decode = Decode.empty(self.model, self.fallback_sampler)
        for name in PER_ROW:
            setattr(one, name, [getattr(self, name)[at]])
        one._next_tokens = self._next_tokens[at : at + 1]
        one.prompt_cache = Prefill(self.model, one.uids, [self.extract_cache(at)]).prompt_cache
        mx.eval([cache.state for cache in one.prompt_cache])  # or it would keep all of the batch
        self.filter([i for i in range(len(self)) if i != at])
        return one

    def _for_rows(self) -> tuple[Sampler, Rows]:
        """What was made for a step serves the next one if its rows are the same."""
        if self._made is None or self._made[0].rows != self.samplers:
            self._made = Sampler(self.samplers), _rows(self.samplers)
        return self._made


class Prefill(PromptProcessingBatch):
    uids: list[int]
    tokens: list[list[int]]
    samplers: list[Row]
    prompt_cache: list[Any]
    logits_processors: list[Any]

    def prompt(self, tokens: list[list[int]]) -> None:
        """Computes so much more of each row's prompt."""
        lengths = [len(row) for row in tokens]
        if max(lengths) == 1 and min(lengths) == 0:
            self._prompt_token(tokens, lengths)
        else:
            with using(_rows(self.samplers)):
                super().prompt(tokens)

    def _prompt_token(self, tokens: list[list[int]], lengths: list[int]) -> None:
        """One token for some rows, none for others. Padded to two: what is one token wide, a
        rotating cache takes for a step of decoding, in which no row is padded."""
        for known, row in zip(self.tokens, tokens, strict=True):
            known += row
        for cache in self.prompt_cache:
            cache.prepare(lengths=lengths, right_padding=[2 - length for length in lengths])
        with using(_rows(self.samplers)):
            self.model(mx.array([[*row, 0, 0][:2] for row in tokens]), cache=self.prompt_cache)
        for cache in self.prompt_cache:
            cache.finalize()
        mx.eval([cache.state for cache in self.prompt_cache])

    def decode(self, last_tokens: list[int]) -> Decode:
        """The same rows, all but the last token of each computed, as a batch that decodes."""
        return Decode(
            self.model,
            self.uids,
            mx.array(last_tokens),
            self.prompt_cache,
            self.tokens,
            self.samplers,
            self.fallback_sampler,
            self.logits_processors,
            self.stop_sequences,
            self.max_tokens,
        )


@dataclass
class Waiting:
    """A row that has not begun."""

    row: Row
    prompt: list[int]
    max_tokens: int
    stops: StopSequences
    script: list[int] | None
    cache: list[Any] | None
    """Of the whole prompt but its last token, if that was computed on the way here."""


@dataclass
class Done:
    """What one step of a batch brought."""

    tokens: list[Token] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)
    failed: list[RowFailed] = field(default_factory=list)
    """Rows that have left the batch."""


class Batch:
    """Rows join and leave at any step; `step` gives each decoding row its next token."""

    def __init__(
        self,
        model: nn.Module,
        *,
        concurrency: int,
        key: str = "",
        cache: PromptCache | None = None,
        held: Collection[int] = (),
    ) -> None:
        """held: rows that get no tokens, for as long as they are among these."""
        self.model = model
        self._held = held
        self._aside: list[Decode] = []
        """Of the rows that were held, one in each."""
        self._concurrency = concurrency
        self._key = key
        self._cache = cache or PromptCache(0)
        self._pace = Pace()
        self._waiting: deque[Waiting] = deque()
        self._prefill = Prefill.empty(model, greedy_sampler)
        self._rest: list[list[int]] = []
        """Of each row being prefilled, the tokens not computed yet; the last one decodes."""
        self._decode = Decode.empty(model, greedy_sampler)
        self._began = 0.0
        self._cycle = Cycle()
        self._room = 0
        """Tokens of prompt to be computed before the rows decode again."""
        self.warm = False
        """Has given a token: every kernel has been compiled and run."""
        # The width shows in the shape of an output that is never computed.
        self.vocabulary: int = model(mx.array([[0]])).shape[-1]

    def __len__(self) -> int:
        """Those that there is something to do for."""
        return len(self._waiting) + len(self._prefill) + len(self._decode) + len(self._returning)

    @property
    def plays(self) -> bool:
        return isinstance(self.model, ReplayModel)

    @property
    def rows(self) -> list[int]:
        return [row.number for row in self._rows]

    def rows_with(self, adapter: str) -> list[int]:
        return [row.number for row in self._rows if row.use[0] == adapter]

    @property
    def _rows(self) -> list[Row]:
        waiting = [waiting.row for waiting in self._waiting]
        aside = [row for one in self._aside for row in one.samplers]
        return [*waiting, *self._prefill.samplers, *self._decode.samplers, *aside]

    @property
    def _returning(self) -> list[Decode]:
        return [one for one in self._aside if one.uids[0] not in self._held]

    @property
    def waiting(self) -> int:
        """Rows without a token yet."""
        return len(self._waiting) + len(self._prefill)

    @property
    def ready_at(self) -> float:
        """By time.perf_counter(); later than now while a replay model keeps its delay."""
        return self._began + max((row.delay for row in self._decode.samplers), default=0.0)

    def add(
        self, asked: Generate, cache: list[Any] | None = None, guide: Guide | None = None
    ) -> None:
        """cache: of the whole prompt but its last token, if that has been computed."""
        row = Row(asked.row, asked.prompt, asked.sampling, self.vocabulary)
        row.delay = asked.delay
        row.use = use(asked)
        row.guide = guide
        stops = _stop_sequences(tuple(asked.stop_tokens))
        self._waiting.append(
            Waiting(row, asked.prompt, asked.max_tokens, stops, asked.script, cache)
        )

    def cancel(self, number: int) -> None:
        if number in self._decode.uids:
            at = self._decode.uids.index(number)
            tokens, row = self._decode.tokens[at], self._decode.samplers[at]
            self._keep(row, tokens, lambda: self._decode.extract_cache(at))
            self._decode.filter([i for i in range(len(self._decode)) if i != at])
        elif number in self._prefill.uids:
            at = self._prefill.uids.index(number)
            self._rest.pop(at)
            self._prefill.filter([i for i in range(len(self._prefill)) if i != at])
        else:
            self._waiting = deque(w for w in self._waiting if w.row.number != number)
            self._aside = [one for one in self._aside if one.uids[0] != number]

    def step(self) -> Done:
        """A token for every row that decodes, or a piece of the next prompt: in turns, so that
        tokens are on their way while a piece is computed."""
        began = time.perf_counter()
        done = Done()
        if not self._room:
            self._began = began
            self._set_aside()
            self._decode_step(done)
            self._cycle = Cycle(len(self._decode), self._joining)
            self._room = self._pace.tokens(self._cycle) if self.waiting else 0
        if not done.tokens:
            self._cycle.prefilled = self._prefill_piece(self._room, done)
            self._room = 0
        self._cycle.seconds += time.perf_counter() - began
        if not self._room:
            self._pace.learn(self._cycle)
        self._drop_failed(self._decode.samplers, done)
        return done

    def _set_aside(self) -> None:
        """Those that are held; those that no longer are come back when there is room."""
        for row in [row for row in self._decode.uids if row in self._held]:
            self._aside.append(self._decode.part(self._decode.uids.index(row)))
        room = self._concurrency - len(self._decode) - len(self._prefill)
        for one in self._returning[: max(0, room)]:
            self._aside.remove(one)
            self._decode.extend(one)

    def _decode_step(self, done: Done) -> None:
        rows = {row.number: row for row in self._decode.samplers}
        responses = self._decode.next()
        done.tokens = [self._token(rows, response) for response in responses]
        self.warm = self.warm or bool(done.tokens)
        self._drop_failed(list(rows.values()), done)

    def _drop_failed(self, rows: list[Row], done: Done) -> None:
        for row, failure in [(row, row.failure) for row in rows if row.failure]:
            self.cancel(row.number)
            done.tokens = [token for token in done.tokens if token.row != row.number]
            done.failed.append(RowFailed(row.number, failure))
            if row.error:  # what was computed of it may be no numbers either
                self._cache.forget(self._computed_by(row))

    @property
    def _joining(self) -> int:
        return min(self.waiting, self._concurrency - len(self._decode))

    def _token(self, rows: dict[int, Row], response: Any) -> Token:
        if response.finish_reason is not None:
            row = rows[response.uid]  # by now it has left the batch
            self._keep(row, response.all_tokens, lambda: response.prompt_cache)
        return Token(response.uid, response.token, response.finish_reason, response.logprobs)

    def _prefill_piece(self, room: int, done: Done) -> int:
        """Computes up to `room` tokens; rows with nothing left but their last token decode."""
        if not self._prefill.uids:
            self._begin(room, done)
        if not self._prefill.uids:
            return 0
        longest = max(len(rest) for rest in self._rest) - 1
        size = longest if longest < min(room * LAST_PIECE, PIECE) else room
        if size:
            self._prefill.prompt([rest[: min(size, len(rest) - 1)] for rest in self._rest])
            self._rest = [rest[min(size, len(rest) - 1) :] for rest in self._rest]
        if all(len(rest) == 1 for rest in self._rest):
            self._go_on_decoding()
        return size

    def _begin(self, room: int, done: Done) -> None:
        """The next waiting row, and as many after it as are prefilled in the same piece."""
        taken: list[Waiting] = []
        longest = 0
        while self._waiting and len(self._decode) + len(taken) < self._concurrency:
            candidate = self._waiting[0]
            longest = max(longest, len(candidate.prompt))
            if taken and (longest * (len(taken) + 1) > room or _shared(candidate, taken)):
                break
            taken.append(self._waiting.popleft())
        if taken:
            self._rest, caches = [], []
            for waiting in taken:
                cache, cached = self._known(waiting)
                caches.append(cache)
                self._rest.append(waiting.prompt[cached:])
                # A prompt that was scored is computed by now, but was not known from before.
                done.prefilled.append(Prefilled(waiting.row.number, 0 if waiting.cache else cached))
            self._prefill = self._prefill_batch(taken, caches)

    def _known(self, waiting: Waiting) -> tuple[list[Any], int]:
        beginning = waiting.prompt[:-1]
        if waiting.cache is not None:
            cache, cached = waiting.cache, len(beginning)
        else:
            known, cached = self._cache.fetch(self._computed_by(waiting.row), beginning)
            cache = known or make_prompt_cache(self.model)
        if waiting.script is not None:
            follow(cache, waiting.script, len(waiting.prompt))
        return cache, cached

    def _prefill_batch(self, rows: list[Waiting], caches: list[list[Any]]) -> Prefill:
        return Prefill(
            self.model,
            [waiting.row.number for waiting in rows],
            caches,
            [
                waiting.prompt[: len(waiting.prompt) - len(rest)]
                for waiting, rest in zip(rows, self._rest, strict=True)
            ],
            PIECE,
            [waiting.row for waiting in rows],
            greedy_sampler,
            [()] * len(rows),
            [waiting.stops for waiting in rows],
            [waiting.max_tokens for waiting in rows],
        )

    def _go_on_decoding(self) -> None:
        prefilled = zip(self._prefill.samplers, self._prefill.tokens, strict=True)
        for at, (row, tokens) in enumerate(prefilled):
            self._keep(row, tokens, partial(self._prefill.extract_cache, at))
        self._decode.extend(self._prefill.decode([rest[0] for rest in self._rest]))
        self._prefill = Prefill.empty(self.model, greedy_sampler)
        self._rest = []

    def _keep(self, row: Row, tokens: list[int], extracted: Callable[[], list[Any]]) -> None:
        """Extracting costs something, and can't be done of a cache that is empty."""
        if not row.failure and self._cache.wants(tokens):
            self._cache.store(self._computed_by(row), list(tokens), extracted())

    def _computed_by(self, row: Row) -> str:
        return self._key if row.use == BASE else cache_key(self._key, *row.use)


def use(asked: Generate) -> Use:
    """Nothing of an adapter is the base, whose prompts are also its own."""
    return (asked.adapter, asked.adapter_scale) if asked.adapter and asked.adapter_scale else BASE


def _rows(rows: list[Row]) -> Rows:
    return Rows([row.use for row in rows])


def _shared(candidate: Waiting, taken: list[Waiting]) -> bool:
    beginning = candidate.prompt[:SHARED]
    return len(beginning) == SHARED and any(w.prompt[:SHARED] == beginning for w in taken)


@lru_cache(maxsize=256)
def _stop_sequences(tokens: tuple[int, ...]) -> StopSequences:
    return StopSequences([[token] for token in tokens])
