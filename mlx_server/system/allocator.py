"""The C library's allocator, in the server process."""

import ctypes
import sys
from contextlib import suppress

MAPPED_BYTES = 1 << 20
"""A block of this size or more is mapped by itself."""

_M_MMAP_THRESHOLD = -3


def return_large_blocks() -> None:
    """Memory of large requests goes back to the system as soon as it is free.

    By itself glibc raises its threshold with each large block that is freed, and so keeps what
    several large requests took. Other allocators have no such option.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
