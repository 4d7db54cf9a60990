"""Prometheus metrics, counted from the events of answers and the steps of the engine."""

import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import generate_latest as exposition

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
)
from mlx_server.pool.footprint import footprint
from mlx_server.pool.pool import Pool
from mlx_server.system.logs import RequestLogContext, request_context

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)

router = APIRouter()


class Metrics:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.registry = registry = CollectorRegistry()
        by_model = ("model",)
        self.requests = Counter(
            "mlx_server_requests", "Requests ended.", ("model", "outcome"), registry=registry
        )
        self.prompt_tokens = Counter(
            "mlx_server_prompt_tokens", "Prompt tokens.", by_model, registry=registry
        )
        self.cached_tokens = Counter(
            "mlx_server_cached_prompt_tokens",
            "Prompt tokens found in the cache.",
            by_model,
            registry=registry,
        )
        self.ahead_tokens = Counter(
            "mlx_server_ahead_tokens",
            "Tokens of conversations' next prompts computed while nobody waited.",
            by_model,
            registry=registry,
        )
        self.used_ahead_tokens = Counter(
            "mlx_server_used_ahead_tokens",
            "Those of them that a prompt then found in the cache.",
            by_model,
            registry=registry,
        )
        self.completion_tokens = Counter(
            "mlx_server_completion_tokens", "Generated tokens.", by_model, registry=registry
        )
        self.reasoning_tokens = Counter(
            "mlx_server_reasoning_tokens",
            "Generated reasoning tokens.",
            by_model,
            registry=registry,
        )
        self.final_tokens = Counter(
            "mlx_server_final_tokens",
            "Generated tokens of answers' text: neither reasoning nor calls.",
            by_model,
            registry=registry,
        )
        self.tool_output_tokens = Counter(
            "mlx_server_tool_output_tokens",
            "Prompt tokens of tool results, counted once each.",
            by_model,
            registry=registry,
        )
        self.mcp_calls = Counter(
            "mlx_server_mcp_calls",
            "Calls of MCP tools that the server ran.",
            ("model", "outcome"),
            registry=registry,
        )
        self.forced_answers = Counter(
            "mlx_server_led_on",
            "Answers that stopped after their reasoning and were continued.",
            by_model,
            registry=registry,
        )
        self.repairs = Counter(
            "mlx_server_repairs",
            "Repairs of a model's output.",
            ("model", "what"),
            registry=registry,
        )
        self.first_token = Histogram(
            "mlx_server_time_to_first_token_seconds",
            "Time from the request to its first text.",
            by_model,
            buckets=SECONDS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "mlx_server_inter_token_seconds",
            "Time between two chunks of an answer.",
            by_model,
            buckets=STEP_SECONDS,
            registry=registry,
        )
        self.disk_hits = Counter(
            "mlx_server_disk_cache_hits",
            "Prompts of which a part was read from the prompt cache's files.",
            registry=registry,
        )
        self.disk_misses = Counter(
            "mlx_server_disk_cache_misses",
            "Prompts of which the prompt cache's files had no more than the memory.",
            registry=registry,
        )
        self.disk_tokens = Counter(
            "mlx_server_disk_cache_tokens",
            "Prompt tokens read from the prompt cache's files.",
            registry=registry,
        )
        self.disk_read = Counter(
            "mlx_server_disk_cache_read_bytes",
            "Bytes read from the prompt cache's files.",
            registry=registry,
        )
        self.disk_written = Counter(
            "mlx_server_disk_cache_written_bytes",
            "Bytes of the prompt cache's files that were written.",
            registry=registry,
        )
        self.disk_bytes = Gauge(
            "mlx_server_disk_cache_bytes",
            "Size of the prompt cache's files on disk.",
            registry=registry,
        )
        self.batch = Gauge("mlx_server_batch_size", "Rows in the last step.", registry=registry)
        self.queue = Gauge(
            "mlx_server_queue", "Rows waiting for their first token.", registry=registry
        )
        self.active = Gauge("mlx_server_active_bytes", "Memory held by MLX.", registry=registry)
        self.buffers = Gauge(
            "mlx_server_buffer_bytes", "Memory that MLX keeps for reuse.", registry=registry
        )
        self.peak = Gauge("mlx_server_peak_bytes", "Peak memory held by MLX.", registry=registry)
        self.model_bytes = Gauge(
            "mlx_server_model_bytes", "Memory of a model.", by_model, registry=registry
        )
        self.process_bytes = Gauge(
            "mlx_server_process_bytes",
            "Resident size of a process; on a Mac, its physical footprint.",
            ("process",),
            registry=registry,
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

    async def observed(self, events: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
        began = time.perf_counter()
        last: dict[int, float] = {}
        model, outcome, turn = "", "cancelled", request_context.get() or RequestLogContext("")
        unfinished: Callable[[], TokenCounts] = TokenCounts
        try:
            async with aclosing(events):
                async for event in events:
                    match event:
                        case Started():
                            model, unfinished = event.model, event.unfinished
                            turn.prompt_tokens += event.prompt_tokens
                            self.prompt_tokens.labels(model).inc(event.prompt_tokens)
                            self.tool_output_tokens.labels(model).inc(event.tool_output_tokens)
                        case (
                            TextDelta(index)
                            | ReasoningDelta(index)
                            | ToolCallStarted(index)
                            | ToolCallDelta(index)
                        ):
                            now = time.perf_counter()
                            self._observe_latency(model, now, last.get(index), began)
                            last[index] = now
                        case Repaired(_, what):
                            self.repairs.labels(model, what).inc()
                        case McpCallFinished(index):  # leaves out the time of the MCP server
                            last[index] = time.perf_counter()
                            ended = "completed" if event.error is None else "failed"
                            self.mcp_calls.labels(model, ended).inc()
                        case Finished():
                            self._count(model, turn, event.counts)
                            self.forced_answers.labels(model).inc(event.answer_forced)
                    yield event
            outcome = "completed"
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.requests.labels(model, outcome).inc()
            if outcome != "completed":
                self._count(model, turn, unfinished())

    def _count(self, model: str, turn: RequestLogContext, counts: TokenCounts) -> None:
        turn.prompt_tokens += counts.further_prompt_tokens
        turn.completion_tokens += counts.completion_tokens
        self.prompt_tokens.labels(model).inc(counts.further_prompt_tokens)
        self.completion_tokens.labels(model).inc(counts.completion_tokens)
        self.cached_tokens.labels(model).inc(counts.cached_tokens)
        self.reasoning_tokens.labels(model).inc(counts.reasoning_tokens)
        self.final_tokens.labels(model).inc(counts.text_tokens)
        self.tool_output_tokens.labels(model).inc(counts.further_tool_output_tokens)

    def _observe_latency(self, model: str, now: float, before: float | None, began: float) -> None:
        if before is None:
            self.first_token.labels(model).observe(now - began)
        else:
            self.inter_token.labels(model).observe(now - before)

    def exposition(self) -> bytes:
        if not self._pool.rows:  # no step follows that would reset the gauges
            self.batch.set(0)
            self.queue.set(0)
        for model in self._pool.loaded:
            self.model_bytes.labels(model.prepared.id).set(model.nbytes)
        self.process_bytes.labels("server").set(footprint(os.getpid()))
        engine = self._pool.supervisor.pid
        self.process_bytes.labels("engine").set(footprint(engine) if engine else 0)
        return exposition(self.registry)


@router.get("/metrics")
async def metrics(http: Request) -> Response:
    found: Metrics = http.app.state.metrics
    return Response(found.exposition(), media_type=CONTENT_TYPE_LATEST)
