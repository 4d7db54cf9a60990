"""What the system gives this process: turns of its threads on the processors, and memory."""

import ctypes
import os
import sys
import threading
from contextlib import suppress

NICENESS = 10
QOS_CLASS_UTILITY = 0x11
"""Apple's class for work whose result is not needed at once, from sys/qos.h."""


def keep_time_slices() -> None:
    """Lets no thread that wakes up interrupt the one that woke it, in this thread and those that it
    starts. On a CPU, MLX hands each operation to a thread of its own: without this, a token of a
    small model takes hundreds of switches between the two, which are half of its time."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox forbids it: slower
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def yield_processor() -> None:
    """Lets other threads run first, where this one and those that it starts would take their
    time."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    elif sys.platform == "darwin":
        ctypes.CDLL(None).pthread_set_qos_class_self_np(QOS_CLASS_UTILITY, 0)


def run_after_others() -> None:
    """Lets other processes run first, if this one has no threads yet."""
    if sys.platform == "linux":  # a real-time priority, which a server may have, would go before
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    yield_processor()


def thread_seconds() -> dict[int, float]:
    """Returns the processor time of each thread of this process."""
    import psutil  # an engine that is well never asks, and starts sooner without it

    threads = psutil.Process().threads()
    return {thread.id: thread.user_time + thread.system_time for thread in threads}


MAPPED_BYTES = 1 << 20
"""A block of this size or more is allocated by mmap."""

_M_MMAP_THRESHOLD = -3


def return_large_blocks() -> None:
    """Makes glibc return the memory of large requests to the system as soon as it is freed.

    By default glibc raises its mmap threshold with each large block that is freed, and then keeps
    the memory of large requests. Other allocators have no such option.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
