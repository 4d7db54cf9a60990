"""The C library's allocator, in the server process."""

import ctypes
import sys
from contextlib import suppress

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
