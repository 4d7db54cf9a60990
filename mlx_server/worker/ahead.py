"""Computes the beginnings of conversations' next prompts while the engine is idle.

A next prompt is computed in short pieces. All other work of the engine comes before the next
piece: what has been computed by then is kept in the prompt cache, and computing goes on from there
when the engine is idle again.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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


@dataclass(eq=False)
class NextPrompt:
    """The beginning of a conversation's next prompt."""

    command: ComputeAhead
    tokens: list[int]
    """Those that are computed, with those in the prompt cache before them."""
    known: int
    """The number of tokens that were in the prompt cache when the conversation's latest answer
    ended."""
    is_computed: bool = False
    cache: Cache = field(default_factory=list)
    """While it is being computed."""
    began: int = 0
    computed: int = 0
    """The number of its tokens that `cache` had at the beginning, and has now."""

    @property
    def key(self) -> Key:
        return prompt_key_of(self.command)

    @property
    def nbytes(self) -> int:
        return sum(int(entry.nbytes) for entry in self.cache)

    def common(self, prompt: list[int]) -> int:
        return common_length(ids_of(prompt), ids_of(self.tokens))


class AheadComputation:
    def __init__(self, cache: MemoryTier, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cache = cache
        self._clock = clock
        self._prompts: list[NextPrompt] = []
        """The prompts in their order of arrival. Computed ones stay until their conversation goes
        on."""
        self._present: NextPrompt | None = None
        """The prompt that is being computed."""
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
        if present is None:
            return
        cache, present.cache = present.cache, []
        if (length := present.computed) > present.began:
            self._cache.store(
                present.key,
                present.tokens[:length],
                cache,
                continued_from=length,
                disk_length=length if present.command.on_disk else 0,
                goes_on=True,
            )

    def step(self, networks: Mapping[str, nn.Module]) -> list[ComputedAhead]:
        """Computes one piece. networks: those of all models in memory."""
        if self._present is None:
            self._present = self._begin(networks)
        if (present := self._present) is None:
            return []
        piece = self._compute_piece(networks[present.command.model], present)
        is_whole = present.computed == len(present.tokens)
        if is_whole or not self._has_room(present):
            present.is_computed = True
            self.interrupt()
        return [ComputedAhead(present.command.model, computed=piece)]

    def _begin(self, networks: Mapping[str, nn.Module]) -> NextPrompt | None:
        prompt = self._next()
        if prompt is None:
            return None
        cache, known = self._cache.fetch(prompt.key, prompt.tokens)
        prompt.cache = cache or make_caches(networks[prompt.command.model])
        prompt.began = prompt.computed = known
        is_large = 2 * prompt.nbytes > self._cache.max_bytes  # its next turn needs a second one
        if known == len(prompt.tokens) or is_large or not self._has_room(prompt):
            self._prompts.remove(prompt)
            return None
        return prompt

    def _has_room(self, present: NextPrompt) -> bool:
        """Makes room for the cache and what the next piece adds to it. The memory is the prompt
        cache's own, so it needs no lease."""
        left = len(present.tokens) - present.computed
        growth = present.nbytes * min(left, present.computed) // max(1, present.computed)
        room = self._cache.max_bytes - present.nbytes - growth
        if room < 0:
            return False
        self._cache.shrink(room)
        return True

    def _compute_piece(self, model: nn.Module, present: NextPrompt) -> int:
        cost = self._costs.setdefault(present.command.model, PrefillCost())
        size = max(LEAST, min(MOST, cost.tokens(PIECE_SECONDS, 1, present.computed)))
        piece = present.tokens[present.computed : present.computed + size]
        began = self._clock()
        with using(RowAdapters([row_adapter_of(present.command)]), model):
            model(mx.array([piece]), cache=present.cache)
        mx.eval([entry.state for entry in present.cache])
        cost.learn(PrefillPiece(1, len(piece), present.computed), self._clock() - began)
        present.computed += len(piece)
        return len(piece)
