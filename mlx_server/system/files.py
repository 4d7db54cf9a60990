"""Files that other programs and users could replace or link to.

A file may be replaced between a check and its use, by a pipe too. The user's own files are written
so that no other user can read them, and through no link that another user may have made: the owner
of a folder could put a link there that leads a program with more rights to another file.
"""

import errno
import fcntl
import os
import secrets
import stat
import time
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
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", os.fspath(path))
        if is_own and status.st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "it is another user's file", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


MOST_BYTES = 64 << 20
"""The most bytes of a file that is read whole; a file with a hole may have any size."""


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", os.fspath(path))
        return file.read(size)


def sync(path: Path) -> None:
    """Returns when the file, or the names in the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MOST_LINKS = 40


def write_private(path: Path, content: bytes) -> None:
    """Writes a new file that only the user can read. Raises FileExistsError if there is one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)  # else a power failure after a rename could leave an empty file


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replaces a file by one that appears whole: a full disk leaves the old one. A link to it stays
    one. By default only the user can read it."""
    place = own_path(path)
    draft = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    try:
        write_private(draft, content)
        draft.chmod(mode)
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)


def not_linked(path: str, flags: int) -> int:
    """An opener for `open`, of a path from `own_path` at whose end no link may have been put
    since."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def own_path(path: Path) -> Path:
    """The path with its links followed. Raises OSError for a link that is not the user's own or
    root's, or that others could have replaced."""
    at, rest, links = Path("/"), [*path.absolute().parts[1:]], 0
    while rest:
        place = at / rest.pop(0)
        if place.name == "..":
            at = at.parent
        elif not place.is_symlink():
            at = place
        elif links == MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        elif not _is_own(place):
            raise PermissionError(
                errno.EPERM, "another user may have made this link", os.fspath(place)
            )
        else:
            links += 1
            target = Path(os.readlink(place))
            at = Path("/") if target.is_absolute() else at
            rest = [*target.parts[target.is_absolute() :], *rest]
    return at


def _is_own(link: Path) -> bool:
    own, folder = {0, os.geteuid()}, link.parent.stat()
    is_open = folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX
    return link.lstat().st_uid in own and folder.st_uid in own and not is_open


LOCKED = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def create_locked(path: Path) -> int:
    """Makes a file that is locked until the descriptor is closed, which the kernel does when the
    process ends. Raises FileExistsError if there is one."""
    while True:
        descriptor = os.open(path, LOCKED | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process removed it before it was locked


def lock_abandoned(path: Path) -> int:
    """Locks a file of `create_locked` until the descriptor is closed. Raises BlockingIOError if the
    process that made it has not ended."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_abandoned(path: Path) -> bool:
    """Removes a file of `create_locked` whose process has ended. Returns whether it is gone."""
    try:
        descriptor = lock_abandoned(path)
    except (FileNotFoundError, BlockingIOError) as error:
        return isinstance(error, FileNotFoundError)
    try:
        if os.fstat(descriptor).st_nlink:  # else the path may be a new file's by now
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
    return True


POLL_SECONDS = 0.01


def lock_within(seconds: float, descriptor: int, how: int) -> bool:
    """Locks a file as `flock` does. Returns False if others have it locked all the time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        time.sleep(POLL_SECONDS)
