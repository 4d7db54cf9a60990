"""How many files and sockets the process may have open, and how many of them are for clients."""

import resource
import sys
from contextlib import suppress

from mlx_server import limits
from mlx_server.errors import SettingsError

ENOUGH = 4096
"""With fewer, many clients at once are refused that could be served."""

FEWEST = 64
"""With fewer, the server and its engine can't open what they consist of."""

SHARE_OF_CLIENTS = 0.5
"""The other half is for what nobody may go without: the store, the engine, MCP servers, files."""

FIX = f"let processes open {ENOUGH} files (`ulimit -Hn {ENOUGH}`, or LimitNOFILE= of systemd)"


def raise_soft_limit() -> int:
    """Towards the hard limit, as far as is useful; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _attempts(hard):
        if soft == resource.RLIM_INFINITY or wanted <= soft:
            break
        # macOS takes less than the hard limit that it tells: kern.maxfilesperproc, or OPEN_MAX
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
    return available()


def _attempts(hard: int) -> list[int]:
    """Decreasing, the first being the best."""
    most = limits.DESCRIPTORS.value
    best = most if hard == resource.RLIM_INFINITY else min(hard, most)
    return [best, *(size for size in (10_240, 8192, 4096, 2048, 1024, 512, 256) if size < best)]


def available() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def within_reach() -> int:
    """What `raise_soft_limit` can come to."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _attempts(hard)[0]


def connections(descriptors: int) -> int:
    """How many clients may be connected at once."""
    return max(1, min(limits.CONNECTIONS.value, int(descriptors * SHARE_OF_CLIENTS)))


def connections_per_address(connections: int) -> int:
    """Some are left for all others."""
    return max(1, min(limits.CONNECTIONS_PER_ADDRESS.value, connections * 3 // 4))


def check(descriptors: int) -> None:
    """Raises SettingsError where the server could not start, or not for long."""
    if descriptors < FEWEST:
        raise SettingsError(
            f"Only {descriptors} files and sockets can be open at once, and the server needs "
            f"{FEWEST} at least: {FIX}."
        )


def warning(descriptors: int) -> str | None:
    if descriptors >= ENOUGH:
        return None
    return (
        f"only {descriptors} files and sockets can be open at once, so at most "
        f"{connections(descriptors)} clients can be connected"
    )


def survive_mlx_lm() -> None:
    """On import mlx-lm sets a hard limit of 4096, and raises an error where it is lower already."""
    set_limit = resource.setrlimit

    def set_if_possible(kind: int, limits: tuple[int, int]) -> None:
        with suppress(ValueError, OSError):
            set_limit(kind, limits)

    resource.setrlimit = set_if_possible
