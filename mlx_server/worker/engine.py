"""The engine: token ids in, token ids out. One thread of one process owns MLX.

`Engine` is a plain object: give it commands, call `step`, read its reports. `process.py` runs one
in the server's child process, connected by a socket.
"""

import ctypes
import gc
import logging
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_server import limits
from mlx_server.engine import messages
from mlx_server.engine.device_errors import ENDS, MESSAGES, Streak, device_error
from mlx_server.engine.messages import Command, Embed, Generate, Report, Token
from mlx_server.engine.worker_arguments import WorkerArguments
from mlx_server.errors import EngineDied, Overloaded, message_of
from mlx_server.prompt_files import PromptFolder
from mlx_server.worker.ahead import AheadComputation
from mlx_server.worker.batch import Batch
from mlx_server.worker.constrained_decoding.grammar_compiler import (
    CompilerBusy,
    GrammarRefused,
    IsDone,
)
from mlx_server.worker.constrained_decoding.logit_constraints import LogitConstraints
from mlx_server.worker.cost_measurement import CostMeasurements, can_be_measured
from mlx_server.worker.costs import Drift
from mlx_server.worker.kernels import has_gpu
from mlx_server.worker.kv_caches import measure_cache
from mlx_server.worker.loaded_models import LoadedModels, ModelLoads
from mlx_server.worker.prefill.disk_tier import opened
from mlx_server.worker.prompt_store import PromptStore
from mlx_server.worker.row import refused
from mlx_server.worker.rows import Rows
from mlx_server.worker.server_connection import HeartbeatMonitor, Inputs
from mlx_server.worker.share import WHOLE, WholeModel
from mlx_server.worker.sight import sight_of
from mlx_server.worker.speculation.gate import Gate
from mlx_server.worker.speculation.row_drafter import drafter_of

log = logging.getLogger("mlx_server.engine")

GONE = "the model was unloaded"
ADAPTER_GONE = "its adapter was unloaded"


MOST_FREED, FREED_SHARE = 32 << 20, 0.01
"""Bounds on the freed buffers that MLX keeps on a CPU, where they do not count against its memory
limit: MLX's own default in bytes, and a share of the limit."""


def limit_memory(max_bytes: int) -> None:
    mx.set_memory_limit(max_bytes)
    if not has_gpu():  # on a GPU, the limit includes freed buffers
        mx.set_cache_limit(min(MOST_FREED, int(FREED_SHARE * max_bytes)))


def release_memory() -> None:
    """Returns the memory of unloaded weights to the system, instead of keeping it for reuse."""
    gc.collect()
    mx.clear_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


EVERY_STEPS = 256
"""Decoding steps after which buffers are freed: KV caches grow in pieces of as many tokens."""

FLOOR_BYTES = 256 << 20
"""Fewer bytes than this are not worth freeing."""

SHARE = 0.1
"""The share of the memory limit above which buffers are freed earlier."""

LEAST_STEPS = 16
"""The fewest decoding steps between two times that buffers are freed, even if the steps themselves
use more than the share."""


@dataclass
class Buffers:
    """Decides when MLX frees the buffers that it keeps for reuse.

    A KV cache grows by allocating a larger buffer. The old one has a size that is not needed again,
    so such buffers pile up while rows decode. The buffers of a step itself are reused by the next
    one: freeing them too often makes each step get new memory from the system, zeroed page by page.
    """

    limit: int
    """MLX's memory limit in bytes."""
    _steps: int = 0
    """Decoding steps since buffers were freed."""

    def should_free(self, held: int, *, prefilling: bool) -> bool:
        """Whether to free the buffers; call it once after each step.

        held: bytes kept for reuse. prefilling: whether the next piece of a prompt will reuse them.
        """
        self._steps += not prefilling
        least = LEAST_STEPS if held > SHARE * self.limit else EVERY_STEPS
        is_due = not prefilling and held > FLOOR_BYTES and self._steps >= least
        self._steps = 0 if is_due else self._steps
        return is_due


class Engine:
    """Runs all models; each step serves the one of those with rows that has had the least time."""

    def __init__(
        self,
        *,
        concurrency: int = 16,
        tier_wait: float = float(limits.TIER_WAIT_SECONDS),
        cache_bytes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        is_done: IsDone = Future.done,
        wake: Callable[[], None] = lambda: None,
        disk: PromptFolder | None = None,
        share: WholeModel = WHOLE,
        curves: Path | None = None,
    ) -> None:
        """clock, is_done: see `Inputs`. wake: called in other threads when `step` has something to
        do before `pause` ends. disk: the folder of the prompt cache's files. share: the part of
        each model that this process has. curves: the folder of measured cost curves; None measures
        none."""
        self._concurrency = concurrency
        self._clock, self._share = clock, share
        self.prompts = PromptStore(cache_bytes, disk, wake)
        self._ahead = AheadComputation(self.prompts.memory, clock)
        self.models = LoadedModels(self._batch, clock, tier_wait)
        self._batches = self.models.batches
        self._loads = ModelLoads(concurrency, self._batches, share, clock)
        self._measurements = CostMeasurements(curves, clock)
        self._commands: dict[str, messages.LoadModel] = {}
        """The commands that loaded the models."""
        self._buffers = Buffers(mx.get_memory_limit())
        self._device_errors = Streak()
        self.broken = False
        """Whether the GPU accepts no more work from this process, or has failed repeatedly."""
        self._constraints = LogitConstraints(wake, clock, is_done)
        self._rows = Rows(self._constraints, self.models, self.prompts)

    @property
    def pause(self) -> float | None:
        """Seconds until there is something to do; None if only a command gives something to do."""
        if self._loads or self._rows.next_scored or self._is_computing_ahead:
            return 0.0
        now = self._clock()
        due = [batch.ready_at - now for batch in self._batches.values() if batch]
        due += [self._constraints.pause] if self._rows.waiting else []
        masks = self._constraints.threads.pause
        due += [] if masks is None else [masks]
        disk = self.prompts.disk.pause(busy=self._is_busy)
        due += [] if disk is None else [disk]
        measuring = self._measurements.pause
        due += [] if measuring is None or self.models.rows else [measuring]
        return max(0.0, min(due)) if due else None

    @property
    def _is_busy(self) -> bool:
        """Whether rows or loads wait for the next step."""
        return bool(self._loads or self._rows) or self.models.is_busy

    @property
    def warm(self) -> bool:
        """Whether the next step does nothing for the first time, so that it takes a usual time."""
        begins = self._loads or self._rows.waiting
        return not begins and all(b.warm for b in self._batches.values() if b)

    @property
    def loading(self) -> bool:
        return bool(self._loads)

    @property
    def doing(self) -> str:
        """The slowest of the present activities, for the log and the heartbeat."""
        if self._loads:
            return self._loads.doing
        if self._rows.waiting:
            return self._rows.doing
        return messages.GENERATING if self._is_busy else messages.IDLE

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
        self._measurements.interrupt()
        if not isinstance(command, messages.ComputeAhead):  # all other work comes first
            self._ahead.interrupt()
        match command:
            case messages.LoadModel(model, path, stop_tokens, tokenizer):
                self._commands[model] = command
                self._loads.begin(command)
                self._constraints.expect(model, Path(tokenizer or path), stop_tokens)
                if not self.models.is_busy:  # it is read while the weights load
                    self._constraints.read_ahead()
            case messages.UnloadModel(model):
                return self._unload(model)
            case messages.MeasureCache():
                return [measure_cache(command, self._share.cut)]
            case messages.LoadAdapter():
                return [self._load_adapter(command)]
            case messages.UnloadAdapter(model, adapter):
                return self._unload_adapter(model, adapter)
            case Generate(row):
                return self._run_row(row, partial(self._generate, command))
            case messages.Embed(row):
                return self._run_row(row, partial(self._rows.embed, command))
            case messages.ComputeAhead():
                if self.models.can_compute(command):  # else it was unloaded meanwhile
                    self._ahead.add(command)
            case messages.CancelRows(rows):
                return self._cancel(rows)
            case messages.PauseRows(rows):
                self._rows.paused.update(rows)
            case messages.UnpauseRows(rows):
                self._rows.paused.difference_update(rows)
            case messages.PreemptRows(rows):
                self._rows.preempt(rows)
                mx.clear_cache()  # other processes and models need the memory
            case messages.ResumeRows(rows):
                self._rows.resume(rows)
            case messages.LimitCache(max_bytes):
                self.prompts.limit(max_bytes, busy=self._is_busy)
            case messages.LimitMemory(max_bytes):
                limit_memory(max_bytes)
                self._buffers.limit = max_bytes
        return []

    def step(self) -> list[Report]:
        """Reads or writes a piece of a prompt. Then computes a piece of every load, one piece of
        prompt log probabilities and a step of one model; without all of them, a piece of what is
        computed ahead."""
        reports: list[Report] = []
        try:  # first: a row that has its prompt now is admitted in this step
            self.prompts.disk.step(busy=self._is_busy)
        except Exception as error:
            reports += self._device_failed(error)
        if self._is_computing_ahead:
            reports += self._compute_ahead()
        elif self._is_idle and self._measurements.pause == 0:
            reports += self._measure()
        else:
            reports += self._step_all()
        return [*reports, *self.prompts.disk.report()]

    def _step_all(self) -> list[Report]:
        reports = [report for model in self._loads.models for report in self._load(model)]
        for row, command in list(self._rows.waiting.items()):
            reports += self._run_row(row, partial(self._rows.admit, command))
        scored = self._rows.next_scored
        model = self.models.next(scored.tier if scored else None)
        if scored and self.models.is_turn(scored.tier):
            reports += self._compute_scored(scored)
        self._constraints.threads.collect()
        if model and model in self._batches:
            reports += self._step(model)
        if not (self._rows.next_scored or self.models.is_busy):
            self._constraints.read_ahead()
        return reports

    def stop(self) -> None:
        """Writes cached prompts to disk; the engine takes no step after it."""
        self.prompts.disk.stop()

    def _compute_scored(self, command: Generate | Embed) -> list[Report]:
        row, began = command.row, self._clock()
        reports = self._run_row(row, partial(self._rows.compute_piece, row))
        self.models.took(command.tier, began)
        self._rows.end_turn(command.client)
        if row not in self._rows:  # no other step may report that it waits no more
            reports.append(self._step_output(command.model, []))
        return reports

    @property
    def _is_computing_ahead(self) -> bool:
        return self._is_idle and self._ahead.has_work

    @property
    def _is_idle(self) -> bool:
        """Whether there is no load and no row, not even a paused or preempted one."""
        return not self._is_busy and not self.models.rows

    def _measure(self) -> list[Report]:
        """Measures one pass of a model's cost curve."""
        try:
            if model := self._measurements.step():
                self._batches[model].use(self._measurements.curves[model])
        except Exception as error:
            log.exception("the costs of a model could not be measured")
            return self._device_failed(error)
        return []

    def _compute_ahead(self) -> list[Report]:
        try:
            computed = self._ahead.step(self.models.networks)
        except Exception as error:
            log.exception("a prompt could not be computed ahead")
            self._ahead.clear()
            return self._device_failed(error)
        if not self._ahead.has_work:
            mx.clear_cache()  # other processes and models need the memory
        return [*computed, *(self._step_output(report.model, []) for report in computed)]

    def _step(self, model: str) -> list[Report]:
        self._measurements.interrupt()
        batch = self._batches[model]
        rows = batch.rows  # a step that fails may have lost some
        try:
            done = self.models.step(model)
        except Exception as error:
            log.exception("a step of %s failed", model)
            if not (failed := self._device_failed(error, rows)):
                self._rows.lose(model, rows)
                failed = [messages.RowFailed(row, message_of(error)) for row in rows]
            return [*failed, self._step_output(model, [])]
        if any(token.finish for token in done.tokens):
            self._device_errors.answered()
        if batch.drift.is_large:
            self._measurements.measure(model)
            batch.drift = Drift()
        if self._buffers.should_free(mx.get_cache_memory(), prefilling=bool(batch.prefilling)):
            mx.clear_cache()
        return [
            *done.prefilled,
            *done.progress,
            *done.failed,
            self._step_output(model, done.tokens),
        ]

    def _device_failed(self, error: Exception, rows: Iterable[int] = ()) -> list[Report]:
        """Handles an error of the GPU; returns [] for any other error. rows: of the failed step.

        MLX raises GPU errors late, when any model next waits for the GPU. The work that was lost is
        unknown, so all rows fail and all cached prompts are dropped.
        """
        kind = device_error(error)
        if kind is None:
            return []
        again = self._device_errors.failed(time.monotonic()) > 1
        self.broken = self.broken or again or kind in ENDS or self._share.is_one_of_several
        lost = {*rows, *self._rows.lose_all()}
        self._ahead.clear()
        self.prompts.clear()
        with suppress(Exception):  # the GPU may fail again
            mx.clear_cache()
        message = f"{MESSAGES[kind]}; send the request again"
        log.error("%s: %s", MESSAGES[kind], message_of(error))
        failure = messages.DeviceFailed(kind, message, self.broken)
        lost_rows = f"The answer was lost: {message}"
        return [
            failure,
            *(messages.RowFailed(row, lost_rows, EngineDied.__name__) for row in sorted(lost)),
        ]

    def _step_output(self, model: str, tokens: list[Token]) -> messages.StepOutput:
        waiting = len(self._rows) + sum(batch.waiting for batch in self._batches.values())
        return messages.StepOutput(
            model,
            tokens,
            waiting,
            mx.get_active_memory(),
            self.prompts.memory.nbytes,
            mx.get_cache_memory(),
            mx.get_peak_memory(),
        )

    def _run_row(self, row: int, work: Callable[[], list[Report]]) -> list[Report]:
        """Runs work for one row; an error ends that row and no other."""
        try:
            return work()
        except GrammarRefused as refusal:
            self._rows.drop(row)
            return [refused(row, refusal)]
        except CompilerBusy as busy:
            self._rows.drop(row)
            message = f"The answer can't be constrained now: {busy}"
            return [messages.RowFailed(row, message, Overloaded.__name__)]
        except Exception as error:
            self._rows.drop(row)
            log.exception("row %d failed", row)
            return [*self._device_failed(error), messages.RowFailed(row, message_of(error))]

    def _generate(self, command: Generate) -> list[Report]:
        self._rows.check(command)
        return [*self._ahead.arrived(command), *self._rows.add(command)]

    def _cancel(self, rows: list[int]) -> list[Report]:
        self._rows.cancel(rows)
        # Without rows there is no further step that would report that none is waiting.
        busy = self._rows or self.models.is_busy
        return [] if busy else [self._step_output(model, []) for model in self._batches]

    def _load(self, model: str) -> list[Report]:
        try:
            return self._load_piece(model)
        except Exception as error:
            self._loads.end(model)
            self._constraints.forget(model)
            log.exception("%s could not be loaded", model)
            of_files = not isinstance(error, RuntimeError | OSError | MemoryError)
            return [
                *self._device_failed(error),
                messages.CommandFailed("LoadModel", model, message_of(error), of_files=of_files),
            ]

    def _load_piece(self, model: str) -> list[Report]:
        reports, network = self._loads.step(model)
        if network is None:
            return [*reports]
        if not self.models.is_busy:  # the first request shares the GIL with no reader
            self._constraints.read(model)
        path = Path(self._commands[model].path)
        self._loads.end(model)
        if not self._share.is_alike(network):
            log.warning("%s gets no prompt cache: its ranks have different layers", model)
            self.prompts.memory.turn_off()
        if can_be_measured(network) and not self._share.is_one_of_several:
            self._measurements.loaded(model, path, network, self._concurrency)
        batch = self.models.add(model, network)
        batch.warm = self._loads.is_warming
        self.prompts.disk.loaded(model, path, network)
        nbytes = self._share.nbytes(network) + (
            limits.PICTURE_FEATURE_BYTES if sight_of(network) else 0
        )
        return [messages.ModelLoaded(model, batch.vocabulary, nbytes, batch.why_alone)]

    def _batch(self, model: str, network: nn.Module) -> Batch:
        costs = self._share.step_costs(network)
        command = self._commands.get(model, messages.LoadModel(model, ""))
        costs.curve = self._measurements.curves.get(model, costs.curve)
        speculates = command.speculation and self._share.is_alike(network)
        return Batch(
            network,
            concurrency=self._concurrency,
            prompts=self.prompts,
            held=self._rows.paused,
            costs=costs,
            most_padding=command.most_padding,
            gate=Gate(costs.curve) if speculates else None,
            drafter=partial(
                drafter_of, vocabulary=partial(self._constraints.known_vocabulary, model)
            ),
            clock=self._clock,
        )

    def _unload(self, model: str) -> list[Report]:
        aborted = [messages.CommandFailed("LoadModel", model, GONE)] * self._loads.end(model)
        self._ahead.forget(model)
        self.prompts.unloaded(model, busy=self._is_busy)
        self._constraints.forget(model)
        self._measurements.unloaded(model)
        lost = self._rows.remove(model)
        release_memory()
        failed = [messages.RowFailed(row, GONE) for row in lost]
        return [*aborted, *failed, self._step_output(model, []), messages.Unloaded(model)]

    def _load_adapter(self, command: messages.LoadAdapter) -> Report:
        model, adapter = command.model, command.adapter
        try:
            nbytes = self.models.load_adapter(model, adapter, Path(command.path))
        except Exception as error:
            log.exception("adapter %s of %s could not be loaded", adapter, model)
            if device_error(error):  # the adapter's files are not at fault
                raise
            mx.clear_cache()
            return messages.CommandFailed("LoadAdapter", model, message_of(error), adapter)
        return messages.AdapterLoaded(model, adapter, nbytes)

    def _unload_adapter(self, model: str, adapter: str) -> list[Report]:
        reports: list[Report] = []
        if model in self._batches:
            lost = self._rows.with_adapter(model, adapter)
            reports += self._cancel(lost) if lost else []
            reports += [messages.RowFailed(row, ADAPTER_GONE) for row in lost]
            self._ahead.forget(model, adapter)
            self.prompts.memory.unloaded((model, adapter))
            self.models.unload_adapter(model, adapter)
            mx.clear_cache()
        return [*reports, messages.Unloaded(model, adapter)]


def engine_of(
    arguments: WorkerArguments, inputs: Inputs, share: WholeModel | None = None
) -> Engine:
    disk = arguments.disk
    return Engine(
        concurrency=arguments.concurrency,
        tier_wait=arguments.tier_wait,
        cache_bytes=arguments.cache_bytes,
        clock=inputs.clock,
        is_done=inputs.is_done,
        wake=inputs.wake,
        disk=opened(Path(disk.folder), disk.most_bytes, disk.writes_per_day)
        if disk.most_bytes
        else None,
        share=share or WHOLE,
        # on a CPU schedules by a measured curve had fewer tokens a second than the fit of steps
        curves=Path(arguments.curves) if arguments.curves and has_gpu() else None,
    )


def run_steps(
    engine: Engine, monitor: HeartbeatMonitor, inputs: Inputs, send: Callable[..., None]
) -> None:
    """Repeats: handles the commands and takes a step, with a frame for what each reports; sleeps
    while idle.

    Returns when the GPU has failed for good, or the server is gone.
    """
    while not engine.broken:
        monitor.doing = engine.doing
        try:
            commands = inputs.take(engine.pause)
        except EOFError:
            return
        monitor.step_begins(warm=not commands and engine.warm, doing=engine.doing)
        # An unload may free most of the machine's memory, which takes seconds.
        reports = [report for command in commands for report in engine.handle(command)]
        if reports:  # the server prepares its answers while the engine computes
            send(*reports)
        if commands:
            monitor.step_begins(warm=engine.warm, doing=engine.doing)
        reports = engine.step()
        monitor.step_ends()
        if reports:
            send(*reports)
