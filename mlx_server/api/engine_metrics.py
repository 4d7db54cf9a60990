"""Metrics of the engine: its steps, its prompt cache and the memory of the processes."""

import os
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from mlx_server.engine.messages import ComputedAhead, DiskCacheUse, StepOutput
from mlx_server.pool.footprint import footprint
from mlx_server.pool.pool import Pool


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
        if not self._pool.rows:  # no step follows that would reset the gauges
            self.batch.set(0)
            self.queue.set(0)
        for model in self._pool.loaded:
            self.model_bytes.labels(model.prepared.id).set(model.nbytes)
        self.process_bytes.labels("server").set(footprint(os.getpid()))
        engine = self._pool.supervisor.pid
        self.process_bytes.labels("engine").set(footprint(engine) if engine else 0)
