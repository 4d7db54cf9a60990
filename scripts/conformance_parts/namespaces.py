"""Makes a network without a way out, for clients that would connect to their makers.

It has process numbers of its own too, so that a background process of a client ends with it.
"""

import fcntl
import shutil
import socket
import struct
import subprocess

from conformance_parts.installed import Missing

UNSHARE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
SET_FLAGS, UP_AND_RUNNING = 0x8914, 0x41


def alone() -> list[str]:
    """Returns the beginning of a command that runs in such a network."""
    if not shutil.which(UNSHARE[0]):
        raise Missing("there are no network namespaces: unshare is missing")
    done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"there are no network namespaces: {done.stderr.strip()}")
    return list(UNSHARE)


def raise_loopback() -> None:
    """Makes 127.0.0.1 of a new network work."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh", b"lo", UP_AND_RUNNING))
