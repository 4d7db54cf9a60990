"""Limits on the files and sockets that the process may have open, and on those for clients."""

import resource
import sys
from contextlib import suppress

from mlx_server import limits
from mlx_server.errors import SettingsError

ENOUGH = 4096
"""With fewer descriptors, the server refuses clients that it could serve; it logs a warning."""

FEWEST = 64
"""With fewer descriptors, the server and its engine can't open their own files."""

SHARE_OF_CLIENTS = 0.5
"""Share of the descriptors for clients; the rest is for the store, the engine, MCP servers and
files."""

FIX = f"let processes open {ENOUGH} files (`ulimit -Hn {ENOUGH}`, or LimitNOFILE= of systemd)"


def raise_soft_limit() -> int:
    """Raises the soft limit towards the hard limit, as far as is useful. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _attempts(hard):
        if soft == resource.RLIM_INFINITY or wanted <= soft:
            break
        # macOS accepts less than the hard limit it reports: kern.maxfilesperproc, or OPEN_MAX
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
    return available()


def _attempts(hard: int) -> list[int]:
    """Soft limits to try, the best first, decreasing."""
    most = limits.DESCRIPTORS
    best = most if hard == resource.RLIM_INFINITY else min(hard, most)
    return [best, *(size for size in (10_240, 8192, 4096, 2048, 1024, 512, 256) if size < best)]


def available() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def within_reach() -> int:
    """The highest limit that `raise_soft_limit` can set."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _attempts(hard)[0]


def connections(descriptors: int) -> int:
    """The number of clients that may be connected at once."""
    return max(1, min(limits.CONNECTIONS, int(descriptors * SHARE_OF_CLIENTS)))


def connections_per_address(connections: int) -> int:
    """The number of connections that one address may have: at most three quarters, so that others
    find a place."""
    return max(1, min(limits.CONNECTIONS_PER_ADDRESS, connections * 3 // 4))


def check_descriptors(descriptors: int) -> None:
    """Raises SettingsError if there are too few descriptors to start the server."""
    if descriptors < FEWEST:
        raise SettingsError(
            f"Only {descriptors} files and sockets can be open at once, but the server needs at "
            f"least {FEWEST}: {FIX}."
        )


def warning(descriptors: int) -> str | None:
    if descriptors >= ENOUGH:
        return None
    return (
        f"only {descriptors} files and sockets can be open at once, so at most "
        f"{connections(descriptors)} clients can be connected"
    )


def survive_mlx_lm() -> None:
    """mlx-lm sets a hard limit of 4096 on import, and fails if the limit is already lower."""
    set_limit = resource.setrlimit

    def set_if_possible(kind: int, limits: tuple[int, int]) -> None:
        with suppress(ValueError, OSError):
            set_limit(kind, limits)

    resource.setrlimit = set_if_possible
