"""The pool's settings for all models together."""

from dataclasses import dataclass

from mlx_server import limits
from mlx_server.engine.client import NO_DISK, PromptDisk


@dataclass(frozen=True)
class PoolLimits:
    concurrency: int = limits.CONCURRENCY
    """The most rows of one model that are decoded in one batch."""
    queue: int = limits.QUEUE
    """The most answers of one client that may wait for a place in a batch."""
    wait_seconds: float = float(limits.WAIT_SECONDS)
    """How long a request waits for memory before it is refused."""
    budget: int | None = None
    """The bytes for weights and caches; None: `budget_of` takes a default for this machine."""
    wired: str | int = "auto"
    """The bytes of weights to wire on a Mac, or "auto": see engine/wired_memory.py."""
    prompt_cache: int | None = None
    """The most bytes of the prompt cache; None: all that models and rows leave."""
    prompt_disk: PromptDisk = NO_DISK
