"""Computes the beginnings of conversations' next prompts while the engine is idle.

A next prompt is computed in short pieces. All other work of the engine comes before the next
piece: what has been computed by then is kept in the prompt cache, and computing goes on from there
when the engine is idle again.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_server import limits
from mlx_server.engine.messages import ComputeAhead, ComputedAhead, Generate
from mlx_server.prompt_files import common_length
from mlx_server.worker.forward_pass import RowAdapters, using
from mlx_server.worker.kv_caches import make_caches
from mlx_server.worker.prefill.memory_tier import Cache, Key, MemoryTier, ids_of
from mlx_server.worker.prefill.schedule import LEAST, MOST, PrefillCost, PrefillPiece
from mlx_server.worker.prompt_store import NEAREST
from mlx_server.worker.row import prompt_key_of, row_adapter_of

PIECE_SECONDS = 0.1
"""Intended seconds of a piece: a request that arrives during one waits for its end."""


@dataclass
class NextPrompt:
    """The beginning of a conversation's next prompt."""

    command: ComputeAhead
    tokens: list[int]
    """Those that are computed, with those in the prompt cache before them."""
    known: int
    """The number of tokens that were in the prompt cache when the conversation's latest answer
    ended."""
    is_computed: bool = False

    @property
    def key(self) -> Key:
        return prompt_key_of(self.command)

    def common(self, prompt: list[int]) -> int:
        return common_length(ids_of(prompt), ids_of(self.tokens))


@dataclass
class _Present:
    """The prompt that is being computed."""

    prompt: NextPrompt
    cache: Cache
    computed: int
    """The number of its tokens that `cache` has."""
    began: int

    @property
    def nbytes(self) -> int:
        return sum(int(entry.nbytes) for entry in self.cache)


class AheadComputation:
    def __init__(self, cache: MemoryTier, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cache = cache
        self._clock = clock
        self._prompts: list[NextPrompt] = []
        """The prompts in their order of arrival. Computed ones stay until their conversation goes
        on."""
        self._present: _Present | None = None
        self._costs: dict[str, PrefillCost] = {}

    @property
    def has_work(self) -> bool:
        return self._present is not None or self._next() is not None

    def _next(self) -> NextPrompt | None:
        return next((prompt for prompt in self._prompts if not prompt.is_computed), None)

    def add(self, command: ComputeAhead) -> None:
        known = self._cache.known(prompt_key_of(command), command.tokens)
        tokens = command.tokens[: known + command.most]
        if not self._cache.wants(tokens) or len(tokens) - known < NEAREST:
            return
        self._prompts.append(NextPrompt(command, tokens, known))
        del self._prompts[: -limits.PROMPTS_AHEAD]

    def arrived(self, request: Generate) -> list[ComputedAhead]:
        """Drops the prompts whose conversation this request continues. Returns a report of how many
        of their tokens it uses."""
        key, prompt = prompt_key_of(request), request.prompt
        going_on = [p for p in self._prompts if p.key == key and p.common(prompt) > p.known]
        self._prompts = [p for p in self._prompts if p not in going_on]
        if not going_on:
            return []
        cached = self._cache.known(key, prompt[:-1])
        used = max(min(p.common(prompt), cached) - p.known for p in going_on)
        return [ComputedAhead(request.model, used=used)] if used > 0 else []

    def forget(self, model: str, adapter: str | None = None) -> None:
        """Drops the prompts of a model, or only those of one of its adapters."""
        self._prompts = [
            prompt
            for prompt in self._prompts
            if prompt.command.model != model
            or adapter not in (None, row_adapter_of(prompt.command)[0])
        ]

    def clear(self) -> None:
        self._prompts, self._present = [], None

    def interrupt(self) -> None:
        """Keeps what has been computed in the prompt cache, and frees everything else."""
        present, self._present = self._present, None
        if present is not None and present.computed > present.began:
            prompt, length = present.prompt, present.computed
            self._cache.store(
                prompt.key,
                prompt.tokens[:length],
                present.cache,
                continued_from=length,
                disk_length=length if prompt.command.on_disk else 0,
                goes_on=True,
            )

    def step(self, networks: Mapping[str, nn.Module]) -> list[ComputedAhead]:
        """Computes one piece. networks: those of all models in memory."""
        if self._present is None:
            self._present = self._begin(networks)
        if (present := self._present) is None:
            return []
        piece = self._compute_piece(networks[present.prompt.command.model], present)
        is_whole = present.computed == len(present.prompt.tokens)
        if is_whole or not self._has_room(present):
            present.prompt.is_computed = True
            self.interrupt()
        return [ComputedAhead(present.prompt.command.model, computed=piece)]

    def _begin(self, networks: Mapping[str, nn.Module]) -> _Present | None:
        prompt = self._next()
        if prompt is None:
            return None
        cache, known = self._cache.fetch(prompt.key, prompt.tokens)
        cache = cache or make_caches(networks[prompt.command.model])
        present = _Present(prompt, cache, known, known)
        is_large = 2 * present.nbytes > self._cache.max_bytes  # its next turn needs a second one
        if known == len(prompt.tokens) or is_large or not self._has_room(present):
            self._prompts.remove(prompt)
            return None
        return present

    def _has_room(self, present: _Present) -> bool:
        """Makes room for the cache and what the next piece adds to it. The memory is the prompt
        cache's own, so it needs no lease."""
        left = len(present.prompt.tokens) - present.computed
        growth = present.nbytes * min(left, present.computed) // max(1, present.computed)
        room = self._cache.max_bytes - present.nbytes - growth
        if room < 0:
            return False
        self._cache.shrink(room)
        return True

    def _compute_piece(self, model: nn.Module, present: _Present) -> int:
        cost = self._costs.setdefault(present.prompt.command.model, PrefillCost())
        size = max(LEAST, min(MOST, cost.tokens(PIECE_SECONDS, 1, present.computed)))
        piece = present.prompt.tokens[present.computed : present.computed + size]
        began = self._clock()
        with using(RowAdapters([row_adapter_of(present.prompt.command)]), model):
            model(mx.array([piece]), cache=present.cache)
        mx.eval([entry.state for entry in present.cache])
        cost.learn(PrefillPiece(1, len(piece), present.computed), self._clock() - began)
        present.computed += len(piece)
        return len(piece)
