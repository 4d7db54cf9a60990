"""Prometheus metrics, counted from the events of answers and the steps of the engine, and samples
of speed and memory for the page's charts."""

import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
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
from mlx_server.generation.embeddings import Embeddings
from mlx_server.generation.rerank import Relevance
from mlx_server.http.answer_log import AnswerLog, AnswerRecord
from mlx_server.http.security import keyed_router
from mlx_server.pool.memory import footprint
from mlx_server.pool.pool import Pool, TrainingProgress
from mlx_server.requests import Prompt

router = keyed_router()


class Metrics:
    def __init__(self, pool: Pool) -> None:
        self.registry = CollectorRegistry()
        self.answers = AnswerMetrics(self.registry)
        self.engine = EngineMetrics(pool, self.registry)
        self.samples = MetricsSamples()
        self.answers.on_first_token = self.samples.first_token

    def on_step(self, step: StepOutput) -> None:
        self.engine.on_step(step)
        self.samples.stepped(step)

    def exposition(self) -> bytes:
        self.engine.refresh()
        return exposition(self.registry)


@router.get("/metrics")
async def exposed(http: Request) -> Response:
    metrics: Metrics = http.app.state.metrics
    return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


COUNTS_BY_MODEL = {
    "prompt_tokens": "Prompt tokens.",
    "cached_prompt_tokens": "Prompt tokens found in the cache.",
    "completion_tokens": "Generated tokens.",
    "reasoning_tokens": "Generated reasoning tokens.",
    "final_tokens": "Generated tokens of answers' text: neither reasoning nor calls.",
    "tool_output_tokens": "Prompt tokens of tool results, counted once each.",
    "accepted_draft_tokens": "Generated tokens that were drafted, so had no pass of their own.",
    "rejected_draft_tokens": "Drafted tokens that were computed and did not come.",
    "led_on": "Answers that stopped after their reasoning and were continued.",
}
AHEAD_COUNTS = {
    "ahead_tokens": "Tokens of conversations' next prompts computed while the engine was idle.",
    "used_ahead_tokens": "Those of them that a prompt then found in the cache.",
}
DISK_COUNTS = {
    "hits": "Prompts of which a part was read from the prompt cache's files.",
    "misses": "Prompts of which the prompt cache's files had no more than the memory.",
    "tokens": "Prompt tokens read from the prompt cache's files.",
    "read_bytes": "Bytes read from the prompt cache's files.",
    "written_bytes": "Bytes of the prompt cache's files that were written.",
}
GAUGES = {
    "batch_size": "Rows in the last step.",
    "queue": "Rows waiting for their first token.",
    "active_bytes": "Memory held by MLX.",
    "buffer_bytes": "Memory that MLX keeps for reuse.",
    "peak_bytes": "Peak memory held by MLX.",
    "disk_cache_bytes": "Size of the prompt cache's files on disk.",
    "engine_restarts": "Engine processes that were lost and replaced.",
    "resumed_requests": "Requests that went on in the engine that replaced a lost one.",
    "training_steps": "Steps of the adapter's training that is under way; 0 without one.",
    "training_step": "Those of them that are made.",
    "training_loss": "The loss a token of the last one.",
    "training_bytes": "Memory of the process that trains.",
    "disk_cache_written_today_bytes": "Bytes written to these files today, by all servers.",
}

PREFIX = "mlx_server_"
BY_MODEL = ("model",)


PromptWork = TypeVar("PromptWork", Embeddings, Relevance)


class AnswerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, labelnames=BY_MODEL, registry=registry)
        self.log = AnswerLog()
        self.on_first_token: Callable[[float], None] = lambda seconds: None
        self.requests = counter(f"{PREFIX}requests", "Requests ended.", ("model", "outcome"))
        self.counters = {
            name: counter(PREFIX + name, about, BY_MODEL) for name, about in COUNTS_BY_MODEL.items()
        }
        self.mcp_calls = counter(
            f"{PREFIX}mcp_calls", "Calls of MCP tools that the server ran.", ("model", "outcome")
        )
        self.repairs = counter(
            f"{PREFIX}repairs", "Repairs of a model's output.", ("model", "what")
        )
        self.first_token = histogram(
            f"{PREFIX}time_to_first_token_seconds",
            "Time from the request to its first text.",
            buckets=SECONDS,
        )
        self.inter_token = histogram(
            f"{PREFIX}inter_token_seconds",
            "Time between two chunks of an answer.",
            buckets=STEP_SECONDS,
        )

    async def observed(
        self, events: AsyncGenerator[Event], client: str = "", prompts: Sequence[Prompt] = ()
    ) -> AsyncGenerator[Event]:
        last: dict[int, float] = {}
        with self._recorded(client, prompts) as record:
            async with aclosing(events):
                async for event in events:
                    self._observe(event, record, last)
                    yield event

    @contextmanager
    def _recorded(self, client: str, prompts: Sequence[Prompt] = ()) -> Iterator[AnswerRecord]:
        """The record of a request, which is counted by how its block ends."""
        with self.log.record(client, prompts) as record:
            outcome = "cancelled"
            try:
                yield record
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
                self._add(
                    event.model,
                    prompt_tokens=event.prompt_tokens,
                    tool_output_tokens=event.tool_output_tokens,
                )
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
                self._add(model, led_on=event.answer_forced)

    async def counted(self, work: Coroutine[Any, Any, PromptWork], client: str = "") -> PromptWork:
        """Counts work that computes prompts and generates nothing."""
        with self._recorded(client) as record:
            result = await work
            record.model, record.finish = result.model, "stop"
            record.prompt_tokens = result.tokens
            record.turn.prompt_tokens += result.tokens
            self._add(result.model, prompt_tokens=result.tokens)
        return result

    def _count(self, record: AnswerRecord, counts: TokenCounts) -> None:
        model, turn = record.model, record.turn
        record.finished = total((record.finished, counts))
        turn.prompt_tokens += counts.further_prompt_tokens
        turn.completion_tokens += counts.completion_tokens
        self._add(
            model,
            prompt_tokens=counts.further_prompt_tokens,
            cached_prompt_tokens=counts.cached_tokens,
            completion_tokens=counts.completion_tokens,
            reasoning_tokens=counts.reasoning_tokens,
            final_tokens=counts.text_tokens,
            tool_output_tokens=counts.further_tool_output_tokens,
            accepted_draft_tokens=counts.accepted_draft_tokens,
            rejected_draft_tokens=counts.rejected_draft_tokens,
        )

    def _add(self, model: str, **counts: int) -> None:
        for name, count in counts.items():
            self.counters[name].labels(model).inc(count)

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
        self._step = StepOutput("", [], 0, active_bytes=0, cache_bytes=0)
        """The latest one."""
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self._ahead = {
            name: counter(PREFIX + name, about, BY_MODEL) for name, about in AHEAD_COUNTS.items()
        }
        self._disk = {
            name: counter(f"{PREFIX}disk_cache_{name}", about)
            for name, about in DISK_COUNTS.items()
        }
        self._gauges = {name: gauge(PREFIX + name, about) for name, about in GAUGES.items()}
        self._model_bytes = gauge(f"{PREFIX}model_bytes", "Memory of a model.", BY_MODEL)
        self._process_bytes = gauge(
            f"{PREFIX}process_bytes",
            "Resident size of a process; on a Mac, its physical footprint.",
            ("process",),
        )

    def on_step(self, step: StepOutput) -> None:
        self._step = step

    def on_ahead(self, ahead: ComputedAhead) -> None:
        self._ahead["ahead_tokens"].labels(ahead.model).inc(ahead.computed)
        self._ahead["used_ahead_tokens"].labels(ahead.model).inc(ahead.used)

    def on_disk_cache(self, use: DiskCacheUse) -> None:
        for name, counter in self._disk.items():
            counter.inc(getattr(use, name))
        self._set(disk_cache_bytes=use.nbytes)

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            self._gauges[name].set(value)

    def refresh(self) -> None:
        """Sets the gauges when they are read: of steps, by the latest one."""
        is_idle, step = not self._pool.row_slots.taken, self._step
        self._set(
            batch_size=0 if is_idle else len(step.tokens), queue=0 if is_idle else step.waiting
        )
        self._set(active_bytes=step.active_bytes, buffer_bytes=step.buffer_bytes)
        self._set(peak_bytes=step.peak_bytes)
        self._set(engine_restarts=self._pool.restarts, resumed_requests=self._pool.resumed)
        training = self._pool.training or TrainingProgress("", 0)
        self._set(training_steps=training.steps, training_step=training.step)
        self._set(training_loss=training.loss or 0, training_bytes=training.nbytes)
        if writes := self._pool.disk_writes:
            self._set(disk_cache_written_today_bytes=writes.today)
        for model in self._pool.models.loaded:
            self._model_bytes.labels(model.prepared.id).set(model.nbytes)
        self._process_bytes.labels("server").set(footprint(os.getpid()))
        engine = self._pool.supervisor.pid
        self._process_bytes.labels("engine").set(footprint(engine) if engine else 0)


SAMPLE_SECONDS = 15
"""The time that one sample covers."""
PAUSE_SECONDS = 1.0
"""Steps that are further apart do not belong to the same work."""


@dataclass(slots=True)
class MetricsSample:
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


class MetricsSamples:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._samples: deque[MetricsSample] = deque(maxlen=limits.SAMPLES)
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

    def _present(self) -> MetricsSample:
        at = int(self._clock()) // SAMPLE_SECONDS * SAMPLE_SECONDS
        if not self._samples or self._samples[-1].at != at:
            self._samples.append(MetricsSample(at, self._memory))
        return self._samples[-1]


def _ratio(amount: float, of: float) -> float | None:
    return round(amount / of, 3) if of else None
