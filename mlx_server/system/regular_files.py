"""Opens files that another program may replace between a check and their use."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path, *, is_own: bool = False) -> BinaryIO:
    """Opens a file for reading. Raises OSError also for a pipe, a device or a socket, any of which
    could keep its reader waiting for ever; if the file has to be the user's own, also for a link
    and for another user's file."""
    # Opening a pipe without a writer would block without O_NONBLOCK; files ignore it.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if is_own else 0)
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", os.fspath(path))
        if is_own and found.st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "it is another user's file", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()
