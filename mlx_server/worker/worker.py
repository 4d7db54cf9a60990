"""The engine: token ids in, token ids out. One thread of one process owns MLX.

`Engine` is a plain object: give it commands, call `step`, read its reports. `process.py` runs one
in the server's child process, connected by a socket.
"""

import ctypes
import gc
import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.engine.device_errors import ENDS, MESSAGES, Streak, device_error
from mlx_server.engine.messages import (
    DEFAULT_SCHEDULE,
    GENERATING,
    IDLE,
    AdapterFailed,
    AdapterLoaded,
    AdapterUnloaded,
    Admitted,
    CacheMeasured,
    CacheNotMeasured,
    CancelRows,
    Command,
    ComputeAhead,
    DeviceFailed,
    Generate,
    LimitCache,
    LimitMemory,
    LoadAdapter,
    LoadModel,
    MeasureCache,
    ModelLoaded,
    ModelLoadFailed,
    ModelLoading,
    ModelUnloaded,
    PauseRows,
    PreemptRows,
    PromptLogprobs,
    Report,
    ResumeRows,
    RowFailed,
    RowRefused,
    RowTurnedAway,
    Schedule,
    StepOutput,
    Token,
    UnloadAdapter,
    UnloadModel,
    UnpauseRows,
)
from mlx_server.errors import ServerError, public_message
from mlx_server.prompt_files.folder import PromptFolder
from mlx_server.worker import weights
from mlx_server.worker.ahead import AheadComputation
from mlx_server.worker.batch import Batch
from mlx_server.worker.buffer_cache import Buffers
from mlx_server.worker.cache_cost import cache_cost
from mlx_server.worker.constrained_decoding.grammar_compiler import CompilerBusy, GrammarRefused
from mlx_server.worker.constrained_decoding.logit_constraints import (
    LogitConstraint,
    LogitConstraints,
)
from mlx_server.worker.lora.adapters import AdapterWeights
from mlx_server.worker.model_load import Progress, WiredLimit, load
from mlx_server.worker.prefill.disk_tier import DiskTier, NoDiskTier
from mlx_server.worker.prefill.prompt_cache import PromptCache, cache_key
from mlx_server.worker.prompt_logprobs import Scoring, prompt_logprobs
from mlx_server.worker.read_rate import WeightReadPace
from mlx_server.worker.row import row_adapter_of
from mlx_server.worker.row_cache import key_of
from mlx_server.worker.row_validation import check_row

log = logging.getLogger("mlx_server.engine")

GONE = "the model was unloaded"
ADAPTER_GONE = "its adapter was unloaded"

MOST_FREED, FREED_SHARE = 32 << 20, 0.01
"""Bounds on the freed buffers that MLX keeps on a CPU, where they do not count against its memory
limit: MLX's own default in bytes, and a share of the limit."""


class Engine:
    """Runs all models; each step serves the one of those with rows that has had the least time."""

    def __init__(
        self,
        *,
        concurrency: int = 16,
        cache_bytes: int = 0,
        wired: str = "never",
        schedule: Schedule = DEFAULT_SCHEDULE,
        clock: Callable[[], float] = time.perf_counter,
        wake: Callable[[], None] = lambda: None,
        disk: PromptFolder | None = None,
    ) -> None:
        """wake: called in other threads when `step` has something to do before `pause` ends.
        disk: the folder of the prompt cache's files."""
        self._concurrency = concurrency
        self._schedule, self._clock = schedule, clock
        self._cache = PromptCache(cache_bytes)
        self._ahead = AheadComputation(self._cache, clock)
        self._disk = DiskTier(disk, self._cache, wake) if disk and cache_bytes else NoDiskTier()
        self._wired = WiredLimit(wired)
        self._read_pace = WeightReadPace()
        self._buffers = Buffers(mx.get_memory_limit())
        self._device_errors = Streak()
        self.broken = False
        """Whether the GPU accepts no more work from this process, or has failed repeatedly."""
        self._loads: dict[str, Progress] = {}
        self._paths: dict[str, Path] = {}
        """The folders of the models that were loaded last."""
        self._warming = False
        """Whether the last piece of a load was a warm-up step, rather than weights."""
        self._batches: dict[str, Batch] = {}
        self._adapters: dict[str, AdapterWeights] = {}
        self._seconds: dict[str, float] = {}
        """Seconds of steps that each model has had. A model that was idle is raised to `_served`,
        so that it does not make up for the idle time."""
        self._served = 0.0
        """The most seconds that a model had when it was served."""
        self._constraints = LogitConstraints(wake)
        self._unconstrained: dict[int, Generate] = {}
        """Rows that wait for their constraints, or for what the disk has of their prompts."""
        self._prompt_logprobs: dict[int, tuple[Generate, LogitConstraint | None, Scoring]] = {}
        """Rows whose prompt log probabilities are being computed, in the order of their turns."""
        self._paused: set[int] = set()
        """Rows that get no tokens for now; the batches share this set."""
        self._preempted: set[int] = set()
        """Rows that are to be preempted as soon as they join a batch."""

    @property
    def pause(self) -> float | None:
        """Seconds until there is something to do; None if only a command gives something to do."""
        if self._loads or self._prompt_logprobs or (self._is_idle and self._ahead.has_work):
            return 0.0
        now = self._clock()
        due = [batch.ready_at - now for batch in self._batches.values() if batch]
        due += [self._constraints.pause] if self._unconstrained else []
        disk = self._disk.pause(busy=self._is_busy)
        due += [] if disk is None else [disk]
        return max(0.0, min(due)) if due else None

    @property
    def _is_busy(self) -> bool:
        """Whether rows or loads wait for the next step."""
        waiting = self._loads or self._prompt_logprobs or self._unconstrained
        return bool(waiting) or any(self._batches.values())

    @property
    def warm(self) -> bool:
        """Whether the next step does nothing for the first time, so that it takes a usual time."""
        begins = self._loads or self._unconstrained
        return not begins and all(b.warm for b in self._batches.values() if b)

    @property
    def loading(self) -> bool:
        return bool(self._loads)

    @property
    def doing(self) -> str:
        """The slowest of the present activities, for the log and the heartbeat."""
        if loads := list(self._loads):
            return f"{'warming up' if self._warming else 'loading'} {loads[0]}"
        if waiting := list(self._unconstrained.values()):
            if self._disk.is_reading(waiting[0].row):
                return f"reading a prompt of {waiting[0].model} from disk"
            return self._constraints.doing(waiting[0].model)
        return GENERATING if self._is_busy else IDLE

    def handle(self, command: Command) -> list[Report]:
        """Executes a command; a second time if the GPU fails during it, as all commands can be
        repeated. Rows that it concerns may have failed by then. A second failure is final."""
        try:
            return self._handle(command)
        except Exception as error:
            if not (failed := self._device_failed(error)):
                raise
            log.exception("the GPU failed during a command")
        failed += [self._step_output(model, []) for model in self._batches]
        return failed if self.broken else [*failed, *self.handle(command)]

    def _handle(self, command: Command) -> list[Report]:
        if not isinstance(command, ComputeAhead):  # whatever else it is comes first
            self._ahead.interrupt()
        match command:
            case LoadModel(model, path, stop_tokens, tokenizer, kv_bits):
                self._paths[model] = Path(path)
                self._loads[model] = self._loading(Path(path), kv_bits)
                self._constraints.expect(model, Path(tokenizer or path), stop_tokens)
            case UnloadModel(model):
                return self._unload(model)
            case MeasureCache(model, path, kv_bits):
                return [_measured(model, Path(path), kv_bits)]
            case LoadAdapter():
                return [self._load_adapter(command)]
            case UnloadAdapter(model, adapter):
                return self._unload_adapter(model, adapter)
            case Generate(row):
                return self._run_row(row, partial(self._generate, command))
            case ComputeAhead():
                self._compute_later(command)
            case CancelRows(rows):
                return self._cancel(rows)
            case PauseRows(rows):
                self._paused.update(rows)
            case UnpauseRows(rows):
                self._paused.difference_update(rows)
            case PreemptRows(rows):
                self._preempt(rows)
            case ResumeRows(rows):
                self._resume(rows)
            case LimitCache(max_bytes):
                if max_bytes < self._cache.nbytes and not self._is_busy:
                    self._disk.flush()
                self._cache.limit(max_bytes)
            case LimitMemory(max_bytes):
                _limit_memory(max_bytes)
                self._buffers.limit = max_bytes
        return []

    def step(self) -> list[Report]:
        """Computes a piece of every load, one piece of prompt log probabilities and a step of one
        model; without all of them, a piece of what is computed ahead. Then reads or writes a piece
        of a prompt."""
        is_ahead = self._is_idle and self._ahead.has_work
        reports = self._compute_ahead() if is_ahead else self._step_all()
        try:
            self._disk.step(busy=self._is_busy)
        except Exception as error:
            reports += self._device_failed(error)
        return [*reports, *self._disk.report()]

    def _step_all(self) -> list[Report]:
        reports = [report for model in list(self._loads) for report in self._load(model)]
        for row, command in list(self._unconstrained.items()):
            reports += self._run_row(row, partial(self._constrain, command))
        for row, (command, *_) in list(self._prompt_logprobs.items())[:1]:
            reports += self._run_row(row, partial(self._compute_prompt_logprobs, row))
            self._end_scoring_turn(command.client)
            if row not in self._prompt_logprobs:  # no other step may report that it waits no more
                reports.append(self._step_output(command.model, []))
        if model := self._next_model():
            reports += self._step(model)
        if not (self._prompt_logprobs or any(self._batches.values())):
            self._constraints.read_ahead()
        return reports

    def stop(self) -> None:
        """Writes cached prompts to disk; the engine takes no step after it."""
        self._disk.stop()

    @property
    def _is_idle(self) -> bool:
        """Whether there is no load and no row, not even one that is paused or preempted."""
        return not self._is_busy and not any(batch.rows for batch in self._batches.values())

    def _compute_later(self, command: ComputeAhead) -> None:
        """Ignores prompts of models and adapters that were unloaded meanwhile."""
        batch, adapters = self._batches.get(command.model), self._adapters.get(command.model)
        if batch is None or adapters is None or batch.plays:
            return
        has_adapter = command.adapter is None or command.adapter in adapters
        if has_adapter and all(0 <= token < batch.vocabulary for token in command.tokens):
            self._ahead.add(command, key_of(command), row_adapter_of(command))

    def _compute_ahead(self) -> list[Report]:
        try:
            networks = {model: batch.model for model, batch in self._batches.items()}
            computed = self._ahead.step(networks)
        except Exception as error:
            log.exception("a prompt could not be computed ahead")
            self._ahead.clear()
            return self._device_failed(error)
        if not self._ahead.has_work:
            mx.clear_cache()  # other processes and models need the memory
        return [*computed, *(self._step_output(report.model, []) for report in computed)]

    def _next_model(self) -> str | None:
        now = self._clock()
        ready = [m for m, batch in self._batches.items() if batch and batch.ready_at <= now]
        return min(ready, key=lambda model: self._seconds[model], default=None)

    def _step(self, model: str) -> list[Report]:
        batch = self._batches[model]
        rows = batch.rows
        batch.shared = any(b.decoding for b in self._batches.values() if b is not batch)
        self._served = max(self._served, self._seconds[model])
        began = self._clock()
        try:
            done = batch.step()
        except Exception as error:
            log.exception("a step of %s failed", model)
            if not (failed := self._device_failed(error)):
                self._batches[model] = self._batch(model, batch.model)
                failed = [RowFailed(row, _message(error)) for row in rows]
            return [*failed, self._step_output(model, [])]
        finally:
            self._seconds[model] += self._clock() - began
        if any(token.finish for token in done.tokens):
            self._device_errors.answered()
        if self._buffers.to_give_back(mx.get_cache_memory(), prefilling=batch.prefilling):
            mx.clear_cache()
        return [
            *done.prefilled,
            *done.progress,
            *done.failed,
            self._step_output(model, done.tokens),
        ]

    def _device_failed(self, error: Exception) -> list[Report]:
        """Handles an error of the GPU; returns [] for any other error.

        MLX raises GPU errors late, when any model next waits for the GPU. The work that was lost is
        unknown, so all rows fail and all cached prompts are dropped.
        """
        kind = device_error(error)
        if kind is None:
            return []
        again = self._device_errors.failed(time.monotonic()) > 1
        self.broken = self.broken or again or kind in ENDS
        rows = [command.row for command in self._unconstrained.values()]
        rows += [row for batch in self._batches.values() for row in batch.rows]
        rows += list(self._prompt_logprobs)
        self._batches = {m: self._batch(m, b.model) for m, b in self._batches.items()}
        self._unconstrained.clear()
        self._prompt_logprobs.clear()
        self._ahead.clear()
        self._cache.clear()
        with suppress(Exception):  # the GPU may fail again
            mx.clear_cache()
        message = f"{MESSAGES[kind]}; send the request again"
        log.error("the GPU failed: %s", _message(error))
        failure = DeviceFailed(kind, message, self.broken)
        return [failure, *(RowFailed(row, message) for row in rows)]

    def _step_output(self, model: str, tokens: list[Token]) -> StepOutput:
        waiting = len(self._unconstrained) + len(self._prompt_logprobs)
        waiting += sum(batch.waiting for batch in self._batches.values())
        return StepOutput(
            model,
            tokens,
            waiting,
            mx.get_active_memory(),
            self._cache.nbytes,
            mx.get_cache_memory(),
            mx.get_peak_memory(),
        )

    def _run_row(self, row: int, work: Callable[[], list[Report]]) -> list[Report]:
        """Runs work for one row; an error ends that row and no other."""
        try:
            return work()
        except GrammarRefused as refusal:
            self._unconstrained.pop(row, None)
            return [RowRefused(row, str(refusal))]
        except CompilerBusy as busy:
            self._unconstrained.pop(row, None)
            return [RowTurnedAway(row, str(busy))]
        except Exception as error:
            self._unconstrained.pop(row, None)
            self._prompt_logprobs.pop(row, None)
            log.exception("row %d failed", row)
            return [*self._device_failed(error), RowFailed(row, _message(error))]

    def _generate(self, command: Generate) -> list[Report]:
        batch = self._batches[command.model]
        check_row(command, batch)
        if command.adapter is not None and command.adapter not in self._adapters[command.model]:
            raise ValueError(f"adapter {command.adapter} is not loaded")
        key = key_of(command)
        used = self._ahead.arrived(command.model, key, command.prompt)
        if not command.prompt_logprobs:
            self._disk.begin(command.row, key, command.prompt[:-1])
        self._unconstrained[command.row] = command
        return [*used, *self._constrain(command)]

    def _constrain(self, command: Generate) -> list[Report]:
        if self._disk.is_reading(command.row):
            return []
        constraint = None
        if command.grammar is not None or command.thinking is not None:
            constraint = self._constraints.constraint(command)
            if constraint is None:
                return []
        del self._unconstrained[command.row]
        return self._admit(command, constraint)

    def _admit(self, command: Generate, constraint: LogitConstraint | None) -> list[Report]:
        if command.prompt_logprobs:
            top = command.sampling.logprobs or 0
            network = self._batches[command.model].model
            scoring = prompt_logprobs(network, command.prompt, top, row_adapter_of(command))
            self._prompt_logprobs[command.row] = command, constraint, scoring
        else:
            self._add(command, constraint)
        return [Admitted(command.row)]

    def _add(
        self, command: Generate, constraint: LogitConstraint | None, cache: list[Any] | None = None
    ) -> None:
        batch = self._batches[command.model]
        if not batch:
            self._seconds[command.model] = max(self._seconds[command.model], self._served)
        batch.add(command, cache, constraint)
        if command.row in self._preempted:
            self._preempted.remove(command.row)
            batch.preempt(command.row)

    def _compute_prompt_logprobs(self, row: int) -> list[Report]:
        command, constraint, scoring = self._prompt_logprobs[row]
        try:
            next(scoring)
            return []
        except StopIteration as end:
            del self._prompt_logprobs[row]
            logprobs, cache = end.value
        if command.max_tokens:
            self._add(command, constraint, cache)
        return [PromptLogprobs(row, logprobs)]

    def _end_scoring_turn(self, client: str) -> None:
        """Moves the client's rows to the end, in their order of arrival: clients take turns piece
        by piece."""
        for row in [r for r, (c, *_) in self._prompt_logprobs.items() if c.client == client]:
            self._prompt_logprobs[row] = self._prompt_logprobs.pop(row)

    def _cancel(self, rows: list[int]) -> list[Report]:
        self._paused.difference_update(rows)
        self._preempted.difference_update(rows)
        for row in rows:
            self._unconstrained.pop(row, None)
            self._prompt_logprobs.pop(row, None)
            for batch in self._batches.values():
                batch.cancel(row)
        # Without rows there is no further step that would report that none is waiting.
        busy = self._unconstrained or self._prompt_logprobs or any(self._batches.values())
        return [] if busy else [self._step_output(model, []) for model in self._batches]

    def _preempt(self, rows: list[int]) -> None:
        for row in rows:
            if row in self._unconstrained or row in self._prompt_logprobs:
                self._preempted.add(row)
            for batch in self._batches.values():
                batch.preempt(row)
        mx.clear_cache()  # other processes and models need the memory

    def _resume(self, rows: list[int]) -> None:
        self._preempted.difference_update(rows)
        for row in rows:
            for batch in self._batches.values():
                batch.resume(row)

    def _load(self, model: str) -> list[Report]:
        try:
            return self._load_piece(model)
        except Exception as error:
            self._loads.pop(model, None)
            self._constraints.forget(model)
            log.exception("%s could not be loaded", model)
            return [*self._device_failed(error), ModelLoadFailed(model, _message(error))]

    def _load_piece(self, model: str) -> list[Report]:
        self._read_pace.while_decoding = any(self._batches.values())
        try:
            progress = next(self._loads[model])
            self._warming = progress is None
            return [ModelLoading(model, *progress)] if progress else []
        except StopIteration as end:
            del self._loads[model]
            network = end.value
        batch = self._batches[model] = self._batch(model, network)
        batch.warm = self._warming
        self._disk.loaded(model, self._paths[model], network)
        self._adapters[model] = AdapterWeights(network)
        self._seconds[model] = 0.0
        nbytes = sum(array.nbytes for array in weights.arrays(network))
        return [ModelLoaded(model, batch.vocabulary, nbytes, batch.why_alone)]

    def _loading(self, path: Path, kv_bits: int | None) -> Progress:
        def wire(nbytes: int) -> None:
            present = [batch.model for batch in self._batches.values()]
            self._wired.before_reading(nbytes, present, rows=any(self._batches.values()))

        return load(path, self._read_pace, wire, self._concurrency, kv_bits)

    def _batch(self, model: str, network: nn.Module) -> Batch:
        return Batch(
            network,
            concurrency=self._concurrency,
            key=model,
            cache=self._cache,
            held=self._paused,
            schedule=self._schedule,
            clock=self._clock,
            on_invalid=self._disk.forget,
        )

    def _unload(self, model: str) -> list[Report]:
        aborted = [ModelLoadFailed(model, GONE)] if self._loads.pop(model, None) else []
        if not self._is_busy:
            self._disk.flush(model)
        self._disk.unloaded(model)
        self._ahead.forget(model)
        self._cache.forget(model)
        batch = self._batches.pop(model, None)
        self._adapters.pop(model, None)
        self._seconds.pop(model, None)
        self._constraints.forget(model)
        lost = [command.row for command in self._not_in_batches(model)]
        for row in lost:
            self._unconstrained.pop(row, None)
            self._prompt_logprobs.pop(row, None)
        lost += batch.rows if batch is not None else []  # a batch without active rows is falsy
        del batch
        _give_back_memory()
        failed = [RowFailed(row, GONE) for row in lost]
        return [*aborted, *failed, self._step_output(model, []), ModelUnloaded(model)]

    def _load_adapter(self, command: LoadAdapter) -> Report:
        model, adapter = command.model, command.adapter
        try:
            if model not in self._adapters:
                raise ValueError(f"model {model} is not loaded")
            nbytes = self._adapters[model].load(adapter, Path(command.path))
        except Exception as error:
            log.exception("adapter %s of %s could not be loaded", adapter, model)
            if device_error(error):  # the adapter's files are not at fault
                raise
            mx.clear_cache()
            return AdapterFailed(model, adapter, _message(error))
        return AdapterLoaded(model, adapter, nbytes)

    def _unload_adapter(self, model: str, adapter: str) -> list[Report]:
        reports: list[Report] = []
        if model in self._adapters:
            lost = self._rows_with(model, adapter)
            reports += self._cancel(lost) if lost else []
            reports += [RowFailed(row, ADAPTER_GONE) for row in lost]
            self._ahead.forget(model, adapter)
            self._cache.forget(cache_key(model, adapter))
            self._adapters[model].unload(adapter)
            mx.clear_cache()
        return [*reports, AdapterUnloaded(model, adapter)]

    def _rows_with(self, model: str, adapter: str) -> list[int]:
        lost = [c.row for c in self._not_in_batches(model) if c.adapter == adapter]
        return lost + self._batches[model].rows_with(adapter)

    def _not_in_batches(self, model: str) -> list[Generate]:
        scored = [command for command, *_ in self._prompt_logprobs.values()]
        return [c for c in [*self._unconstrained.values(), *scored] if c.model == model]


def _measured(model: str, path: Path, kv_bits: int | None) -> Report:
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
        return CacheMeasured(model, cache_cost(config, kv_bits))
    except Exception as error:
        log.exception("%s can't be built", model)
        return CacheNotMeasured(model, _message(error))


def _message(error: Exception) -> str:
    return error.message if isinstance(error, ServerError) else public_message(error)


def _limit_memory(max_bytes: int) -> None:
    mx.set_memory_limit(max_bytes)
    if not mx.metal.is_available():  # with Metal, the limit includes freed buffers
        mx.set_cache_limit(min(MOST_FREED, int(FREED_SHARE * max_bytes)))


def _give_back_memory() -> None:
    """Returns the memory of unloaded weights to the system, instead of keeping it for reuse."""
    gc.collect()
    mx.clear_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
