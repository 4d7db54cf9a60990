"""What the system says of a process: its state, and whether it does anything."""

import sys
from contextlib import suppress
from pathlib import Path

import psutil

from mlx_server.engine.liveness import Vitals

RUNNABLE = frozenset("RD")
"""Linux's letters for a thread that runs or could, and for one that waits for the disk."""


def vitals(pid: int) -> Vitals | None:
    """None: there is no such process."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            times = process.cpu_times()
            pageins = getattr(process.memory_info(), "pageins", 0)  # on a Mac
    except psutil.Error:
        return None
    processor = times.user + times.system
    wants = sys.platform == "linux" and _wants(pid)
    return Vitals("stopped" if stopped else "running", processor + pageins, processor, wants)


def _wants(pid: int) -> bool:
    """psutil knows the state of the first thread only."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # a thread that has ended
            if stat.read_text().rpartition(")")[2].split()[0] in RUNNABLE:
                return True
    return False
