"""Opens files that another program may replace between a check and their use."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError also for a pipe, a device or a socket, any of which
    could keep its reader waiting for ever."""
    # Opening a pipe without a writer would block without O_NONBLOCK; files ignore it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a file", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()
