"""The engine: token ids in, token ids out. One thread of one process owns MLX.

`Engine` is a plain object: give it commands, call `step`, read its reports. `process.py` runs one
at the far end of a socket, as the server's child process.
"""

import ctypes
import gc
import logging
import math
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.engine import weights
from mlx_server.engine.batch import Batch, use
from mlx_server.engine.grammar import Refused
from mlx_server.engine.guide import Guide, Guides
from mlx_server.engine.messages import (
    AdapterFailed,
    AdapterLoaded,
    AdapterUnloaded,
    Admitted,
    Cancel,
    Command,
    Generate,
    GoOn,
    Hold,
    LimitCache,
    LimitMemory,
    Load,
    LoadAdapter,
    Loaded,
    LoadFailed,
    Loading,
    Report,
    RowFailed,
    RowRefused,
    Scored,
    Stepped,
    Thinking,
    Token,
    Unload,
    UnloadAdapter,
    Unloaded,
)
from mlx_server.engine.prompt_cache import PromptCache, cache_key
from mlx_server.engine.scoring import Scoring, score
from mlx_server.errors import ServerError, told
from mlx_server.lora.adapters import Adapters
from mlx_server.requests import SamplingParams

log = logging.getLogger("mlx_server.engine")

GONE = "the model was unloaded"
ADAPTER_GONE = "its adapter was unloaded"

LARGEST_SCALE = 4.0

MOST_FREED, FREED_SHARE = 32 << 20, 0.01
"""What MLX keeps of freed buffers on a CPU, where it counts them for nothing: as many bytes as it
would by itself, if that is no more than this share of its limit."""

LONGEST_GRAMMAR = 4 << 20
MOST_MARKS = 64
LONGEST_MARK = 256
"""Bytes; and tokens, of what ends reasoning."""

Progress = Generator[tuple[int, int], None, nn.Module]


class Engine:
    """Every step goes to one model: of those that have rows, the one that had the least time."""

    def __init__(
        self,
        *,
        concurrency: int = 16,
        cache_bytes: int = 0,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """wake: called in other threads when `step` has something to do before `pause` is over."""
        self._concurrency = concurrency
        self._cache = PromptCache(cache_bytes)
        self._loads: dict[str, Progress] = {}
        self._batches: dict[str, Batch] = {}
        self._adapters: dict[str, Adapters] = {}
        self._seconds: dict[str, float] = {}
        """That each model has had. What it did not use while it rested is written off, so that it
        neither makes up for it nor waits for the others to do so."""
        self._served = 0.0
        """The most that a model had when it was served."""
        self._guides = Guides(wake)
        self._unguided: dict[int, Generate] = {}
        """Rows that wait for their guide."""
        self._scorings: dict[int, tuple[Generate, Guide | None, Scoring]] = {}
        self._held: set[int] = set()
        """Rows that get no tokens for now, wherever they are."""

    @property
    def pause(self) -> float | None:
        """Seconds until there is something to do; None: until there is a command."""
        if self._loads or self._scorings:
            return 0.0
        now = time.perf_counter()
        due = [batch.ready_at - now for batch in self._batches.values() if batch]
        due += [self._guides.pause] if self._unguided else []
        return max(0.0, min(due)) if due else None

    @property
    def warm(self) -> bool:
        """Whether the next step does nothing for the first time: it takes no longer than usual."""
        return not self._loads and all(b.warm for b in self._batches.values() if b)

    @property
    def loading(self) -> bool:
        return bool(self._loads)

    def handle(self, command: Command) -> list[Report]:
        match command:
            case Load(model, path, stop_tokens):
                self._loads[model] = weights.load(Path(path))
                self._guides.expect(model, Path(path), stop_tokens)
            case Unload(model):
                return self._unload(model)
            case LoadAdapter():
                return [self._load_adapter(command)]
            case UnloadAdapter(model, adapter):
                return self._unload_adapter(model, adapter)
            case Generate(row):
                return self._alone(row, partial(self._generate, command))
            case Cancel(rows):
                return self._cancel(rows)
            case Hold(rows):
                self._held.update(rows)
            case GoOn(rows):
                self._held.difference_update(rows)
            case LimitCache(max_bytes):
                self._cache.limit(max_bytes)
            case LimitMemory(max_bytes):
                _limit_memory(max_bytes)
        return []

    def step(self) -> list[Report]:
        """A piece of every load, one of the first scoring, and a step of one model."""
        reports = [self._load(model) for model in list(self._loads)]
        for row, command in list(self._unguided.items()):
            reports += self._alone(row, partial(self._guide, command))
        for row, (command, *_) in list(self._scorings.items())[:1]:
            reports += self._alone(row, partial(self._score, row))
            if row not in self._scorings:  # no other step may say that it waits no more
                reports.append(self._stepped(command.model, []))
        if model := self._next_model():
            reports += self._step(model)
        if not (self._scorings or any(self._batches.values())):
            self._guides.read_ahead()
        return reports

    def _next_model(self) -> str | None:
        now = time.perf_counter()
        ready = [m for m, batch in self._batches.items() if batch and batch.ready_at <= now]
        return min(ready, key=lambda model: self._seconds[model], default=None)

    def _step(self, model: str) -> list[Report]:
        batch = self._batches[model]
        rows = batch.rows
        self._served = max(self._served, self._seconds[model])
        began = time.perf_counter()
        try:
            done = batch.step()
        except Exception as error:
            log.exception("a step of %s failed", model)
            self._batches[model] = self._batch(model, batch.model)
            failed: list[Report] = [RowFailed(row, _said(error)) for row in rows]
            return [*failed, self._stepped(model, [])]
        finally:
            self._seconds[model] += time.perf_counter() - began
        return [*done.prefilled, *done.failed, self._stepped(model, done.tokens)]

    def _stepped(self, model: str, tokens: list[Token]) -> Stepped:
        waiting = len(self._unguided) + len(self._scorings)
        waiting += sum(batch.waiting for batch in self._batches.values())
        return Stepped(model, tokens, waiting, mx.get_active_memory(), self._cache.nbytes)

    def _alone(self, row: int, work: Callable[[], list[Report]]) -> list[Report]:
        """What goes wrong with one row ends that row and no other."""
        try:
            return work()
        except Refused as refusal:
            self._unguided.pop(row, None)
            return [RowRefused(row, str(refusal))]
        except Exception as error:
            self._unguided.pop(row, None)
            self._scorings.pop(row, None)
            log.exception("row %d failed", row)
            return [RowFailed(row, _said(error))]

    def _generate(self, command: Generate) -> list[Report]:
        batch = self._batches[command.model]
        _check(command, batch)
        if command.adapter is not None and command.adapter not in self._adapters[command.model]:
            raise ValueError(f"adapter {command.adapter} is not loaded")
        if command.grammar is None and command.thinking is None:
            return self._admit(command, None)
        self._unguided[command.row] = command
        return self._guide(command)

    def _guide(self, command: Generate) -> list[Report]:
        guide = self._guides.guide(command)
        if guide is None:
            return []
        del self._unguided[command.row]
        return self._admit(command, guide)

    def _admit(self, command: Generate, guide: Guide | None) -> list[Report]:
        if command.score:
            top = command.sampling.logprobs or 0
            network = self._batches[command.model].model
            scoring = score(network, command.prompt, top, use(command))
            self._scorings[command.row] = command, guide, scoring
        else:
            self._add(command, guide)
        return [Admitted(command.row)]

    def _add(self, command: Generate, guide: Guide | None, cache: list[Any] | None = None) -> None:
        batch = self._batches[command.model]
        if not batch:
            self._seconds[command.model] = max(self._seconds[command.model], self._served)
        batch.add(command, cache, guide)

    def _score(self, row: int) -> list[Report]:
        command, guide, scoring = self._scorings[row]
        try:
            next(scoring)
            return []
        except StopIteration as end:
            del self._scorings[row]
            logprobs, cache = end.value
        if command.max_tokens:
            self._add(command, guide, cache)
        return [Scored(row, logprobs)]

    def _cancel(self, rows: list[int]) -> list[Report]:
        self._held.difference_update(rows)
        for row in rows:
            self._unguided.pop(row, None)
            self._scorings.pop(row, None)
            for batch in self._batches.values():
                batch.cancel(row)
        # With no row left there is no step to say that none waits.
        left = self._unguided or self._scorings or any(self._batches.values())
        return [] if left else [self._stepped(model, []) for model in self._batches]

    def _load(self, model: str) -> Report:
        try:
            return self._load_piece(model)
        except Exception as error:
            self._loads.pop(model, None)
            self._guides.forget(model)
            log.exception("%s did not load", model)
            return LoadFailed(model, _said(error))

    def _load_piece(self, model: str) -> Report:
        try:
            return Loading(model, *next(self._loads[model]))
        except StopIteration as end:
            del self._loads[model]
            network = end.value
        batch = self._batches[model] = self._batch(model, network)
        self._adapters[model] = Adapters(network)
        self._seconds[model] = 0.0
        nbytes = sum(array.nbytes for array in weights.arrays(network))
        return Loaded(model, batch.vocabulary, nbytes)

    def _batch(self, model: str, network: nn.Module) -> Batch:
        return Batch(
            network,
            concurrency=self._concurrency,
            key=model,
            cache=self._cache,
            held=self._held,
        )

    def _unload(self, model: str) -> list[Report]:
        given_up = [LoadFailed(model, GONE)] if self._loads.pop(model, None) else []
        self._cache.forget(model)
        batch = self._batches.pop(model, None)
        self._adapters.pop(model, None)
        self._seconds.pop(model, None)
        self._guides.forget(model)
        lost = [command.row for command in self._not_in_batches(model)]
        for row in lost:
            self._unguided.pop(row, None)
            self._scorings.pop(row, None)
        lost += batch.rows if batch else []
        del batch
        _give_back_memory()
        failed = [RowFailed(row, GONE) for row in lost]
        return [*given_up, *failed, self._stepped(model, []), Unloaded(model)]

    def _load_adapter(self, command: LoadAdapter) -> Report:
        model, adapter = command.model, command.adapter
        try:
            if model not in self._adapters:
                raise ValueError(f"model {model} is not loaded")
            nbytes = self._adapters[model].load(adapter, Path(command.path))
        except Exception as error:
            log.exception("adapter %s of %s did not load", adapter, model)
            mx.clear_cache()
            return AdapterFailed(model, adapter, _said(error))
        return AdapterLoaded(model, adapter, nbytes)

    def _unload_adapter(self, model: str, adapter: str) -> list[Report]:
        reports: list[Report] = []
        if model in self._adapters:
            lost = self._rows_with(model, adapter)
            reports += self._cancel(lost) if lost else []
            reports += [RowFailed(row, ADAPTER_GONE) for row in lost]
            self._cache.forget(cache_key(model, adapter))
            self._adapters[model].unload(adapter)
            mx.clear_cache()
        return [*reports, AdapterUnloaded(model, adapter)]

    def _rows_with(self, model: str, adapter: str) -> list[int]:
        lost = [c.row for c in self._not_in_batches(model) if c.adapter == adapter]
        return lost + self._batches[model].rows_with(adapter)

    def _not_in_batches(self, model: str) -> list[Generate]:
        scored = [command for command, *_ in self._scorings.values()]
        return [c for c in [*self._unguided.values(), *scored] if c.model == model]


def _check(command: Generate, batch: Batch) -> None:
    """What gets past here is computed together with other rows, and must not harm them."""
    if not command.prompt:
        raise ValueError("the prompt is empty")
    if command.max_tokens < (0 if command.score else 1):
        raise ValueError(f"{command.max_tokens} tokens can't be generated")
    if command.script is not None and not (command.script and batch.plays):
        raise ValueError("there is no script to play, or no model that plays it")
    if not 0 <= command.adapter_scale <= LARGEST_SCALE:
        raise ValueError(f"the adapter's scale is not 0 to {LARGEST_SCALE:g}")
    if not 0 <= command.delay < math.inf:
        raise ValueError("the delay is out of range")
    # MLX checks no index: an id past the end reads, or overwrites, what lies there.
    ids = [*command.prompt, *command.sampling.logit_bias]
    if command.thinking:
        _check_thinking(command.thinking)
        ids += command.thinking.end
    if len(command.grammar or "") > LONGEST_GRAMMAR:
        raise ValueError("the grammar is too long")
    for id in (min(ids), max(ids)):
        if not 0 <= id < batch.vocabulary:
            raise ValueError(f"token id {id} is outside the vocabulary of {batch.vocabulary}")
    if not _in_range(command.sampling):
        raise ValueError("a sampling parameter is out of range")


def _check_thinking(thinking: Thinking) -> None:
    marks = [*thinking.opens, *thinking.closes]
    limits = (thinking.budget or 0, thinking.answer or 0)
    if min(limits) < 0 or not 0 < len(thinking.end) <= LONGEST_MARK:
        raise ValueError("reasoning can't be ended like that")
    if len(marks) > MOST_MARKS or not all(0 < len(mark) <= LONGEST_MARK for mark in marks):
        raise ValueError("the marks of reasoning are empty, too long or too many")


def _in_range(s: SamplingParams) -> bool:
    penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    return (
        all(map(math.isfinite, (s.temperature, *penalties, *s.logit_bias.values())))
        and s.repetition_penalty > 0
        and s.temperature >= 0
        and s.top_k >= 0
        and s.top_p > 0
        and 0 <= s.min_p <= 1
        and (s.logprobs or 0) >= 0
    )


def _said(error: Exception) -> str:
    return error.message if isinstance(error, ServerError) else told(error)


def _limit_memory(max_bytes: int) -> None:
    mx.set_memory_limit(max_bytes)
    if not mx.metal.is_available():  # there, the limit is also for what is kept for reuse
        mx.set_cache_limit(min(MOST_FREED, int(FREED_SHARE * max_bytes)))


def _give_back_memory() -> None:
    """Unloaded weights go back to the system, not into a free list of ours."""
    gc.collect()
    mx.clear_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
