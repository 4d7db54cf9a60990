"""Measures the memory that a process takes from the machine."""

import ctypes
import sys

import psutil

RUSAGE_INFO_V0 = 0


class _RusageInfo(ctypes.Structure):
    """`struct rusage_info_v0` of macOS's <sys/resource.h>."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("package_idle_wakeups", ctypes.c_uint64),
        ("interrupt_wakeups", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("physical_footprint", ctypes.c_uint64),
        ("started", ctypes.c_uint64),
        ("exited", ctypes.c_uint64),
    )


def footprint(pid: int) -> int:
    """The bytes of memory that the process takes; 0 if there is no such process.

    On a Mac this is the physical footprint that Activity Monitor shows, since the resident size
    leaves out Metal's buffers and compressed memory.
    """
    if sys.platform == "darwin":
        return _physical(pid)
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _physical(pid: int) -> int:
    info = _RusageInfo()
    failed = ctypes.CDLL(None).proc_pid_rusage(pid, RUSAGE_INFO_V0, ctypes.byref(info))
    return 0 if failed else int(info.physical_footprint)
