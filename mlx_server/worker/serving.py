"""Runs an engine: makes it, and repeats its steps."""

from collections.abc import Callable
from pathlib import Path

from mlx_server.engine.worker_arguments import WorkerArguments
from mlx_server.worker.engine import Engine
from mlx_server.worker.prefill.disk_tier import opened
from mlx_server.worker.server_connection import HeartbeatMonitor, Inputs
from mlx_server.worker.share import WHOLE, WholeModel


def engine_of(
    arguments: WorkerArguments, inputs: Inputs, share: WholeModel | None = None
) -> Engine:
    nbytes = arguments.disk_bytes
    return Engine(
        concurrency=arguments.concurrency,
        cache_bytes=arguments.cache_bytes,
        wired=arguments.wired,
        clock=inputs.clock,
        is_done=inputs.is_done,
        wake=inputs.wake,
        disk=opened(Path(arguments.disk_folder), nbytes) if nbytes else None,
        share=share or WHOLE,
    )


def serve(
    engine: Engine, monitor: HeartbeatMonitor, inputs: Inputs, send: Callable[..., None]
) -> None:
    """Repeats: handles the commands, takes a step, sends one frame of reports; sleeps while idle.

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
        if commands:
            monitor.step_begins(warm=engine.warm, doing=engine.doing)
        reports += engine.step()
        monitor.step_ends()
        if reports:
            send(*reports)
