"""The settings that concern all models together."""

from dataclasses import dataclass

from mlx_server import limits
from mlx_server.engine.client import NO_DISK, PromptDisk
from mlx_server.engine.messages import DEFAULT_SCHEDULE, Schedule


@dataclass(frozen=True)
class PoolLimits:
    concurrency: int = 16
    """How many rows of one model are decoded in one batch."""
    queue: int = limits.QUEUE.value
    """How many answers of one client may wait for a place in a batch."""
    schedule: Schedule = DEFAULT_SCHEDULE
    wait_seconds: float = 300.0
    """How long a request waits for memory that other requests hold."""
    budget: int | None = None
    """Bytes for weights and caches; None: a default that suits the machine."""
    wired: str | int = "auto"
    """How many bytes of weights are wired on a Mac: see engine/wired_memory.py."""
    prompt_cache: int | None = None
    """Bytes of the prompt cache; None: all that models and answers leave."""
    prompt_disk: PromptDisk = NO_DISK
