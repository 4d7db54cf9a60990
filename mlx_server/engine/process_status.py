"""Reads a process's state and activity from the operating system."""

import sys
from contextlib import suppress
from pathlib import Path

import psutil

from mlx_server.engine.liveness import Vitals

RUNNABLE = frozenset("RD")
"""Linux's state letters of a runnable thread and of one that waits for the disk."""


def vitals(pid: int) -> Vitals | None:
    """Returns None if there is no such process, or no free descriptor to look at it."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            times = process.cpu_times()
            pageins = getattr(process.memory_info(), "pageins", 0)  # on a Mac
        runnable = sys.platform == "linux" and _is_runnable(pid)
    except (psutil.Error, OSError):
        return None
    processor = times.user + times.system
    return Vitals("stopped" if stopped else "running", processor + pageins, processor, runnable)


def _is_runnable(pid: int) -> bool:
    """Whether any thread is runnable or waits for the disk; psutil knows the first thread only."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # a thread that has ended
            if stat.read_text().rpartition(")")[2].split()[0] in RUNNABLE:
                return True
    return False
