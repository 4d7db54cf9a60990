"""A rank's connections to the others of its group, watched. It does not import MLX, which the
processes of a group import once they can report."""

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress

IDLE_SECONDS, PROBE_SECONDS, PROBES = 3, 1, 5
"""A connection is probed after so many idle seconds and ends after so many lost probes. A host that
is only slow answers them, since its kernel does."""

LOST_SECONDS = IDLE_SECONDS + PROBES * PROBE_SECONDS
"""Limit on data that is not acknowledged, in seconds: the same as for idle connections, which are
probed."""

TCP_RXT_CONNDROPTIME = 0x80
"""The number of macOS's socket option for LOST_SECONDS (netinet/tcp.h)."""


class Link:
    """This rank's connections of the ring, which MLX opens: a link that is cut is noticed within
    seconds. JACCL has none, and its cut is noticed as a step that takes too long.

    TCP itself would give up after many minutes. Where it does, MLX may raise RuntimeError, but a
    step may also wait for ever: so the connections are watched from another thread.
    """

    def __init__(self) -> None:
        """Takes every TCP connection of the process: the engine has no others."""
        self._connections = list(_connections())
        for connection in self._connections:
            for level, option, value in _options():
                connection.setsockopt(level, option, value)

    @property
    def is_cut(self) -> bool:
        return any(not _has_peer(connection) for connection in self._connections)

    def close(self) -> None:
        """Closes its own descriptors; the connections go on."""
        for connection in self._connections:
            connection.close()


def _options() -> Iterator[tuple[int, int, int]]:
    yield socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
    yield socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS
    yield socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES
    if sys.platform == "darwin":
        yield socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, IDLE_SECONDS
        yield socket.IPPROTO_TCP, TCP_RXT_CONNDROPTIME, LOST_SECONDS
    else:
        yield socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS
        yield socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_SECONDS


def _connections() -> Iterator[socket.socket]:
    """Yields the process's TCP connections. Each gets a descriptor of its own, which stays open
    when MLX closes its one."""
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # the descriptor of the listing is closed by now
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                found = socket.socket(fileno=os.dup(descriptor))
                if found.family in (socket.AF_INET, socket.AF_INET6) and _has_peer(found):
                    yield found
                else:
                    found.close()


def _has_peer(connection: socket.socket) -> bool:
    """Whether TCP has not given up. A connection that the other side has closed still has a
    peer."""
    try:
        connection.getpeername()
    except OSError:
        return False
    return True
