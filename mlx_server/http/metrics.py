"""Prometheus metrics, counted from the events of answers and the steps of the engine, and samples
of speed and memory for the page's charts."""

import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import generate_latest as exposition

from mlx_server import limits
from mlx_server.engine.messages import ComputedAhead, DiskCacheUse, StepOutput
from mlx_server.events import (
    Event,
    Finished,
    McpCallFinished,
    ReasoningDelta,
    Repaired,
    Started,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallStarted,
    total,
)
from mlx_server.http.answer_log import AnswerLog, AnswerRecord
from mlx_server.pool.memory import footprint
from mlx_server.pool.pool import Pool
from mlx_server.requests import Prompt

router = APIRouter()


class Metrics:
    def __init__(self, pool: Pool) -> None:
        self.registry = CollectorRegistry()
        self.answers = AnswerMetrics(self.registry)
        self.engine = EngineMetrics(pool, self.registry)
        self.samples = Samples()
        self.answers.on_first_token = self.samples.first_token

    def on_step(self, step: StepOutput) -> None:
        self.engine.on_step(step)
        self.samples.stepped(step)

    def exposition(self) -> bytes:
        self.engine.refresh()
        return exposition(self.registry)


@router.get("/metrics")
async def metrics(http: Request) -> Response:
    found: Metrics = http.app.state.metrics
    return Response(found.exposition(), media_type=CONTENT_TYPE_LATEST)


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


class PromptWork(Protocol):
    @property
    def model(self) -> str: ...
    @property
    def tokens(self) -> int: ...


PromptWorkT = TypeVar("PromptWorkT", bound=PromptWork)


class AnswerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        by_model = ("model",)
        self.log = AnswerLog()
        self.on_first_token: Callable[[float], None] = lambda seconds: None
        self.requests = counter("mlx_server_requests", "Requests ended.", ("model", "outcome"))
        self.prompt_tokens = counter("mlx_server_prompt_tokens", "Prompt tokens.", by_model)
        self.cached_tokens = counter(
            "mlx_server_cached_prompt_tokens", "Prompt tokens found in the cache.", by_model
        )
        self.completion_tokens = counter(
            "mlx_server_completion_tokens", "Generated tokens.", by_model
        )
        self.reasoning_tokens = counter(
            "mlx_server_reasoning_tokens", "Generated reasoning tokens.", by_model
        )
        self.final_tokens = counter(
            "mlx_server_final_tokens",
            "Generated tokens of answers' text: neither reasoning nor calls.",
            by_model,
        )
        self.tool_output_tokens = counter(
            "mlx_server_tool_output_tokens",
            "Prompt tokens of tool results, counted once each.",
            by_model,
        )
        self.mcp_calls = counter(
            "mlx_server_mcp_calls", "Calls of MCP tools that the server ran.", ("model", "outcome")
        )
        self.forced_answers = counter(
            "mlx_server_led_on",
            "Answers that stopped after their reasoning and were continued.",
            by_model,
        )
        self.repairs = counter(
            "mlx_server_repairs", "Repairs of a model's output.", ("model", "what")
        )
        self.first_token = histogram(
            "mlx_server_time_to_first_token_seconds",
            "Time from the request to its first text.",
            by_model,
            buckets=SECONDS,
        )
        self.inter_token = histogram(
            "mlx_server_inter_token_seconds",
            "Time between two chunks of an answer.",
            by_model,
            buckets=STEP_SECONDS,
        )

    async def observed(
        self, events: AsyncGenerator[Event], client: str = "", prompts: Sequence[Prompt] = ()
    ) -> AsyncGenerator[Event]:
        last: dict[int, float] = {}
        with self.log.record(client, prompts) as record:
            outcome = "cancelled"
            try:
                async with aclosing(events):
                    async for event in events:
                        self._observe(event, record, last)
                        yield event
                outcome = "completed"
            except Exception:
                outcome = "failed"
                raise
            finally:
                self.requests.labels(record.model, outcome).inc()
                if outcome != "completed" and record.started:
                    self._count(record, record.started.unfinished())

    def _observe(self, event: Event, record: AnswerRecord, last: dict[int, float]) -> None:
        """last: the time of the latest chunk of each answer."""
        if record.answer and not isinstance(event, Started) and event.index == 0:
            record.answer.add(event)
        model = record.model
        match event:
            case Started():
                record.started, record.model = event, event.model
                record.prompt_tokens = event.prompt_tokens
                record.turn.prompt_tokens += event.prompt_tokens
                self.prompt_tokens.labels(event.model).inc(event.prompt_tokens)
                self.tool_output_tokens.labels(event.model).inc(event.tool_output_tokens)
            case (
                TextDelta(index)
                | ReasoningDelta(index)
                | ToolCallStarted(index)
                | ToolCallDelta(index)
            ):
                now = time.perf_counter()
                self._observe_latency(record, now, last.get(index))
                last[index] = now
            case Repaired(_, what):
                record.repairs += 1
                self.repairs.labels(model, what).inc()
            case McpCallFinished(index):  # leaves out the time of the MCP server
                last[index] = time.perf_counter()
                ended = "completed" if event.error is None else "failed"
                self.mcp_calls.labels(model, ended).inc()
            case Finished():
                record.finish = event.reason
                self._count(record, event.counts)
                self.forced_answers.labels(model).inc(event.answer_forced)

    async def counted(
        self, work: Coroutine[Any, Any, PromptWorkT], client: str = ""
    ) -> PromptWorkT:
        """Counts work that computes prompts and generates nothing."""
        outcome = "cancelled"
        with self.log.record(client) as record:
            try:
                found = await work
                record.model, outcome = found.model, "completed"
                record.finish = "stop"
                record.prompt_tokens = found.tokens
                record.turn.prompt_tokens += found.tokens
                self.prompt_tokens.labels(found.model).inc(found.tokens)
                return found
            except Exception:
                outcome = "failed"
                raise
            finally:
                self.requests.labels(record.model, outcome).inc()

    def _count(self, record: AnswerRecord, counts: TokenCounts) -> None:
        model, turn = record.model, record.turn
        record.finished = total((record.finished, counts))
        turn.prompt_tokens += counts.further_prompt_tokens
        turn.completion_tokens += counts.completion_tokens
        self.prompt_tokens.labels(model).inc(counts.further_prompt_tokens)
        self.completion_tokens.labels(model).inc(counts.completion_tokens)
        self.cached_tokens.labels(model).inc(counts.cached_tokens)
        self.reasoning_tokens.labels(model).inc(counts.reasoning_tokens)
        self.final_tokens.labels(model).inc(counts.text_tokens)
        self.tool_output_tokens.labels(model).inc(counts.further_tool_output_tokens)

    def _observe_latency(self, record: AnswerRecord, now: float, before: float | None) -> None:
        if before is not None:
            self.inter_token.labels(record.model).observe(now - before)
            return
        self.first_token.labels(record.model).observe(now - record.began)
        if record.first_at is None:
            record.first_at = now
            self.on_first_token(now - record.began)


class EngineMetrics:
    def __init__(self, pool: Pool, registry: CollectorRegistry) -> None:
        self._pool = pool
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        by_model = ("model",)
        self.ahead_tokens = counter(
            "mlx_server_ahead_tokens",
            "Tokens of conversations' next prompts computed while the engine was idle.",
            by_model,
        )
        self.used_ahead_tokens = counter(
            "mlx_server_used_ahead_tokens",
            "Those of them that a prompt then found in the cache.",
            by_model,
        )
        self.disk_hits = counter(
            "mlx_server_disk_cache_hits",
            "Prompts of which a part was read from the prompt cache's files.",
        )
        self.disk_misses = counter(
            "mlx_server_disk_cache_misses",
            "Prompts of which the prompt cache's files had no more than the memory.",
        )
        self.disk_tokens = counter(
            "mlx_server_disk_cache_tokens", "Prompt tokens read from the prompt cache's files."
        )
        self.disk_read = counter(
            "mlx_server_disk_cache_read_bytes", "Bytes read from the prompt cache's files."
        )
        self.disk_written = counter(
            "mlx_server_disk_cache_written_bytes",
            "Bytes of the prompt cache's files that were written.",
        )
        self.disk_bytes = gauge(
            "mlx_server_disk_cache_bytes", "Size of the prompt cache's files on disk."
        )
        self.batch = gauge("mlx_server_batch_size", "Rows in the last step.")
        self.queue = gauge("mlx_server_queue", "Rows waiting for their first token.")
        self.active = gauge("mlx_server_active_bytes", "Memory held by MLX.")
        self.buffers = gauge("mlx_server_buffer_bytes", "Memory that MLX keeps for reuse.")
        self.peak = gauge("mlx_server_peak_bytes", "Peak memory held by MLX.")
        self.model_bytes = gauge("mlx_server_model_bytes", "Memory of a model.", by_model)
        self.process_bytes = gauge(
            "mlx_server_process_bytes",
            "Resident size of a process; on a Mac, its physical footprint.",
            ("process",),
        )

    def on_step(self, step: StepOutput) -> None:
        self.batch.set(len(step.tokens))
        self.queue.set(step.waiting)
        self.active.set(step.active_bytes)
        self.buffers.set(step.buffer_bytes)
        self.peak.set(step.peak_bytes)

    def on_ahead(self, ahead: ComputedAhead) -> None:
        self.ahead_tokens.labels(ahead.model).inc(ahead.computed)
        self.used_ahead_tokens.labels(ahead.model).inc(ahead.used)

    def on_disk_cache(self, use: DiskCacheUse) -> None:
        self.disk_hits.inc(use.hits)
        self.disk_misses.inc(use.misses)
        self.disk_tokens.inc(use.tokens)
        self.disk_read.inc(use.read_bytes)
        self.disk_written.inc(use.written_bytes)
        self.disk_bytes.set(use.nbytes)

    def refresh(self) -> None:
        """Sets the gauges that no report sets."""
        if not self._pool.row_slots.taken:  # no step follows that would reset the gauges
            self.batch.set(0)
            self.queue.set(0)
        for model in self._pool.models.loaded:
            self.model_bytes.labels(model.prepared.id).set(model.nbytes)
        self.process_bytes.labels("server").set(footprint(os.getpid()))
        engine = self._pool.supervisor.pid
        self.process_bytes.labels("engine").set(footprint(engine) if engine else 0)


SAMPLE_SECONDS = 15
"""The time that one sample covers."""
PAUSE_SECONDS = 1.0
"""Steps that are further apart do not belong to the same work."""


@dataclass(slots=True)
class Sample:
    at: int
    """A Unix time, when it begins."""
    memory: int
    """The most bytes in use of the memory budget."""
    tokens: int = 0
    busy_seconds: float = 0.0
    """The time in which these tokens were generated."""
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    """The sum of the times to the first token."""


class Samples:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=limits.SAMPLES)
        self._memory = 0
        self._last_step = 0.0

    def stepped(self, step: StepOutput) -> None:
        now = self._clock()
        pause, self._last_step = now - self._last_step, now
        if step.tokens and 0 <= pause <= PAUSE_SECONDS:
            sample = self._present()
            sample.tokens += len(step.tokens)
            sample.busy_seconds += pause

    def first_token(self, seconds: float) -> None:
        sample = self._present()
        sample.first_tokens += 1
        sample.first_token_seconds += seconds

    def memory(self, nbytes: int) -> None:
        if nbytes != self._memory:
            sample = self._present()
            sample.memory = max(sample.memory, nbytes)
            self._memory = nbytes

    def columns(self) -> dict[str, Any]:
        """The samples as one list for each number, with the present memory at their end."""
        now = int(self._clock())
        oldest = now - SAMPLE_SECONDS * limits.SAMPLES
        kept = [sample for sample in self._samples if oldest <= sample.at <= now]
        return {
            "now": now,
            "seconds": SAMPLE_SECONDS,
            "since": oldest,
            "at": [sample.at for sample in kept],
            "tokens_per_second": [_ratio(each.tokens, each.busy_seconds) for each in kept],
            "first_token_seconds": [
                _ratio(each.first_token_seconds, each.first_tokens) for each in kept
            ],
            "memory": [sample.memory for sample in kept],
            "memory_now": self._memory,
        }

    def _present(self) -> Sample:
        at = int(self._clock()) // SAMPLE_SECONDS * SAMPLE_SECONDS
        if not self._samples or self._samples[-1].at != at:
            self._samples.append(Sample(at, self._memory))
        return self._samples[-1]


def _ratio(amount: float, of: float) -> float | None:
    return round(amount / of, 3) if of else None
