"""How the system divides its processors between the threads of an engine."""

import os
import sys
from contextlib import suppress


def keep_time_slices() -> None:
    """Lets no thread that wakes up interrupt the one that woke it, in this thread and those that it
    starts. On a CPU, MLX hands each operation to a thread of its own: without this, a token of a
    small model takes hundreds of switches between the two, which are half of its time."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox forbids it: slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
