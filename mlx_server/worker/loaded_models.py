"""The models in memory: how they get there, the batch and the adapters of each, and whose step is
next.

A load goes a piece at a time: it wires memory, reads weights and compiles kernels. For these,
artificial rows go through the same kind of batch as requests.

Models with rows get the same time. Two rules bound how long a row waits for a token, however many
models work: no row waits for a second piece of a prompt, of whichever model, and a row that has
waited for the longest gap goes first.
"""

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_server import limits
from mlx_server.engine.device_errors import device_error
from mlx_server.engine.messages import ComputeAhead, Generate, LoadModel, ModelLoading
from mlx_server.engine.wired_memory import next_limit, wiring
from mlx_server.fair_queue import TierTurns
from mlx_server.requests import SamplingParams, Tier
from mlx_server.worker import weights
from mlx_server.worker.batch import Batch, StepResult
from mlx_server.worker.half_precision import change_to_float16, tries_float16
from mlx_server.worker.kernels import has_gpu
from mlx_server.worker.kv_caches import set_kv_bits
from mlx_server.worker.lora_adapters import AdapterWeights
from mlx_server.worker.share import WholeModel
from mlx_server.worker.weights import HALF_PRECISIONS, WeightReadPace

log = logging.getLogger("mlx_server.engine")

IS_WARM_UP_USEFUL = has_gpu()
"""A CPU has no kernels to compile, and the memory of the rows is not part of any reservation."""

GPU_PROMPT, CPU_PROMPT = 256, 32
"""Prompt tokens: as many as in the first piece of a prompt, fewer on a CPU, which is slow."""

ROWS, TOKENS = 4, 3
"""The number of rows, and of tokens that each generates (the first one generates more)."""

MOST_SECONDS = 15.0
"""The time after which no further step begins; the first request then compiles the remaining
kernels."""

SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=0, logprobs=1),
)


def warm_up(batch: Batch, rows: int, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Yields after each step. batch: a separate one, without a prompt cache."""
    if batch.plays or batch.encodes or not IS_WARM_UP_USEFUL:  # it generates nothing
        return
    until = clock() + MOST_SECONDS
    try:
        for _ in _steps(batch, rows):
            yield
            if clock() > until:
                log.warning(
                    "the warm-up was stopped after %.0f seconds; the first request may be slower",
                    MOST_SECONDS,
                )
                return
    except Exception as error:
        if device_error(error):
            raise
        # If the model is broken, each request will fail with its own error.
        log.warning("a model could not be warmed up", exc_info=True)
    finally:
        mx.clear_cache()


def _steps(batch: Batch, rows: int) -> Iterator[None]:
    tokens = GPU_PROMPT if has_gpu() else CPU_PROMPT
    batch.add(_request(0, batch, tokens))
    while batch.waiting:
        batch.step()
        yield
    for row in range(1, min(rows, ROWS)):
        batch.add(_request(row, batch, tokens // 2))
    while batch:
        batch.step()
        yield


def _request(row: int, batch: Batch, tokens: int) -> Generate:
    prompt = [(7 * row + at) % batch.vocabulary for at in range(tokens)]
    # The first row generates more tokens, so that it still decodes when the others join it.
    return Generate(
        row=row,
        model="",
        prompt=prompt,
        max_tokens=TOKENS if row else 2 * TOKENS + ROWS,
        stop_tokens=[],
        sampling=SAMPLINGS[row % 2],
    )


Progress = Generator[tuple[int, int] | None, None, nn.Module]
"""Yields (bytes read, total bytes), or None after a warm-up step; returns the model."""


def load(
    command: LoadModel,
    pace: WeightReadPace,
    wire: Callable[[int], None],
    concurrency: int,
    share: WholeModel,
    clock: Callable[[], float],
) -> Progress:
    """wire: see `weights.load`."""
    model, path = command.model, Path(command.path)
    dtype = HALF_PRECISIONS.get(command.compute_dtype)
    reading = weights.load(path, pace, share.cut, dtype, sees=command.sees, wire=wire)
    network = yield from share.together(reading)
    # ranks of a group could come to different ends
    if dtype is None and not share.is_one_of_several and tries_float16(network, path):
        why_not = yield from change_to_float16(network, Path(command.tokenizer or path))
        mx.clear_cache()
        if why_not:
            log.warning("%s stays in bfloat16: in float16 %s", model, why_not)
            del network, reading  # there may be no room for two copies
            network = yield from weights.load(path, pace, share.cut, sees=command.sees)
        else:
            log.info("%s computes in float16, since this chip emulates bfloat16", model)
    set_kv_bits(network, command.kv_bits)
    # A separate batch leaves nothing in the prompt cache and no measurement in the budget.
    batch = Batch(network, concurrency=concurrency, costs=share.step_costs(network))
    for _ in warm_up(batch, concurrency, clock):
        yield None
    return network


class WiredLimit:
    """The wired memory limit of this process; `wiring` decides when it grows."""

    def __init__(self) -> None:
        self._limit = 0

    def before_reading(self, nbytes: int, present: Iterable[nn.Module], *, rows: bool) -> None:
        """nbytes: the size of the weights to read. rows: whether any row is running."""
        if not mx.metal.is_available():
            return
        working_set = int(mx.device_info()["max_recommended_working_set_size"])
        total = nbytes + sum(a.nbytes for model in present for a in weights.arrays(model))
        limit = next_limit(self._limit, wiring(total, working_set), rows=rows)
        if limit == self._limit:
            return
        try:
            mx.clear_cache()  # freed buffers would be wired too
            mx.set_wired_limit(limit)
            self._limit = limit
            log.info("wired %.1f GB of weights, of at most %.1f", limit / 1e9, working_set / 1e9)
        except (RuntimeError, ValueError) as error:  # for example before macOS 15
            log.warning("the weights can't be wired: %s", error)


class ModelLoads:
    """The loads in progress, by model."""

    def __init__(
        self,
        concurrency: int,
        batches: Mapping[str, Batch],
        share: WholeModel,
        clock: Callable[[], float],
    ) -> None:
        """batches: those of all models in memory, which the caller changes."""
        self._share, self._clock = share, clock
        self._wired = WiredLimit()
        self._pace = WeightReadPace()
        self._concurrency = concurrency
        self._batches = batches
        self._loads: dict[str, Progress] = {}
        self.is_warming = False
        """Whether the last piece of a load was a warm-up step, rather than weights."""

    def __bool__(self) -> bool:
        return bool(self._loads)

    @property
    def models(self) -> list[str]:
        return list(self._loads)

    @property
    def doing(self) -> str:
        """The work of the first load."""
        return f"{'warming up' if self.is_warming else 'loading'} {self.models[0]}"

    def begin(self, command: LoadModel) -> None:
        self._loads[command.model] = load(
            command, self._pace, self._wire, self._concurrency, self._share, self._clock
        )

    def end(self, model: str) -> bool:
        """Returns whether the model was being loaded."""
        return self._loads.pop(model, None) is not None

    def step(self, model: str) -> tuple[list[ModelLoading], nn.Module | None]:
        """Computes a piece; returns its report, and the model after the last piece."""
        self._pace.while_decoding = any(self._batches.values())
        try:
            progress = next(self._loads[model])
        except StopIteration as end:
            return [], end.value
        self.is_warming = progress is None
        return ([ModelLoading(model, *progress)] if progress else []), None

    def _wire(self, nbytes: int) -> None:
        present = [batch.model for batch in self._batches.values()]
        self._wired.before_reading(nbytes, present, rows=any(self._batches.values()))


class LoadedModels:
    def __init__(
        self,
        make_batch: Callable[[str, nn.Module], Batch],
        clock: Callable[[], float],
        tier_wait: float = float(limits.TIER_WAIT_SECONDS),
    ) -> None:
        """tier_wait: how long lower tiers wait at most, in seconds."""
        self.batches: dict[str, Batch] = {}
        self._seconds: dict[str, float] = {}
        """The time that each model's steps have taken. A model that had no rows is raised to
        `_served` when it has one, so that it does not make up for that time."""
        self._served = 0.0
        """The most seconds that a model had when it was served."""
        self._busy: list[str] = []
        """The models that had rows when the latest step was chosen."""
        self._make_batch = make_batch
        self._clock = clock
        self._turns = TierTurns(tier_wait)
        self._turn: tuple[str, Tier] | None = None
        """The model and the tier of the latest step."""
        self._tier = Tier.DEFAULT
        """The tier that the next step serves."""
        self._adapters: dict[str, AdapterWeights] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a batch can take a step."""
        return any(self.batches.values())

    @property
    def rows(self) -> list[int]:
        """All rows in batches, with paused and preempted ones."""
        return [row for batch in self.batches.values() for row in batch.rows]

    @property
    def networks(self) -> dict[str, nn.Module]:
        return {model: batch.model for model, batch in self.batches.items()}

    def add(self, model: str, network: nn.Module) -> Batch:
        self.batches[model] = self._make_batch(model, network)
        self._adapters[model] = AdapterWeights(network)
        self._seconds[model] = 0.0
        return self.batches[model]

    def remove(self, model: str) -> list[int]:
        """Returns the rows that the model had."""
        batch = self.batches.pop(model, None)
        self._adapters.pop(model, None)
        self._seconds.pop(model, None)
        return [] if batch is None else batch.rows  # a batch without active rows is falsy

    def drop_rows(self, model: str) -> list[int]:
        """Gives a model a new batch; returns the rows of the old one."""
        rows = self.batches[model].rows
        self.batches[model] = self._make_batch(model, self.batches[model].model)
        return rows

    def next(self, other: Tier | None = None) -> str | None:
        """Returns the model that takes the next step. other: the tier of other work."""
        now, before = self._clock(), self._busy
        self._busy = [model for model, batch in self.batches.items() if batch]
        for model in set(self._busy).difference(before):
            self._seconds[model] = max(self._seconds[model], self._served)
        ready = [model for model in self._busy if self.batches[model].ready_at <= now]
        tiers = {model: self.batches[model].tiers for model in ready}
        present = {*chain.from_iterable(tiers.values()), *([other] if other else [])}
        if present:
            pieces = self._prefilling(present, ready) if len(present) > 1 else ()
            self._tier = tier = self._turns.next(present, now, pieces)
            ready = [model for model in ready if tier in tiers[model]]
        late = [model for model in ready if self.batches[model].is_late(self._tier)]
        next_model = self._with_least_time(late or ready)
        if next_model is None or not self.batches[next_model].may_prefill(self._tier):
            return next_model
        overdue = [model for model in ready if self.batches[model].is_overdue(self._tier)]
        return self._with_least_time(overdue) or next_model

    def _prefilling(self, tiers: Collection[Tier], models: list[str]) -> set[Tier]:
        """Returns the tiers whose next step may compute a piece of a prompt."""
        batches = [self.batches[model] for model in models]
        return {tier for tier in tiers if any(each.may_prefill(tier) for each in batches)}

    def _with_least_time(self, models: list[str]) -> str | None:
        return min(models, key=lambda model: self._seconds[model], default=None)

    def step(self, model: str) -> StepResult:
        batch = self.batches[model]
        batch.shared = any(b.decoding for b in self.batches.values() if b is not batch)
        self._served = max(self._served, self._seconds[model])
        self._finish_turn(model)
        began, done = self._clock(), StepResult()
        try:
            done = batch.step(self._tier)
        finally:
            now = self._clock()
            self._seconds[model] += now - began
            self._turns.took(self._tier, now - began, now, piece=done.has_piece)
        if done.has_piece:
            for each in self.batches.values():
                each.waited_for_piece = True
        return done

    def is_turn(self, tier: Tier) -> bool:
        """Whether the next step serves the tier."""
        return tier is self._tier

    def took(self, tier: Tier, began: float) -> None:
        """Counts other work of a tier."""
        now = self._clock()
        self._turns.took(tier, now - began, now)

    def _finish_turn(self, model: str) -> None:
        """Before a step of another tier waits for what the latest one launched ahead: it is that
        one's time."""
        turn, self._turn = self._turn, (model, self._tier)
        if turn is None or turn[1] is self._tier or turn[0] not in self.batches:
            return
        began = self._clock()
        self.batches[turn[0]].decoder.wait()
        now = self._clock()
        self._turns.took(turn[1], now - began, now)

    def has_adapter(self, model: str, adapter: str | None) -> bool:
        """Whether a loaded model has it; all have None."""
        return model in self._adapters and (adapter is None or adapter in self._adapters[model])

    def load_adapter(self, model: str, adapter: str, folder: Path) -> int:
        """Returns its size in bytes."""
        if model not in self._adapters:
            raise ValueError(f"model {model} is not loaded")
        return self._adapters[model].load(adapter, folder)

    def unload_adapter(self, model: str, adapter: str) -> None:
        self._adapters[model].unload(adapter)

    def can_compute(self, command: ComputeAhead) -> bool:
        """Whether its model and adapter are still there, and have all of its tokens."""
        batch = self.batches.get(command.model)
        if batch is None or batch.plays or not self.has_adapter(command.model, command.adapter):
            return False
        return all(0 <= token < batch.vocabulary for token in command.tokens)
