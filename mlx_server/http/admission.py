"""Limits the connections, in total and from one address.

When the limit is reached, a connection without a running request is closed for the new one: first
an idle one, then one whose request head is still arriving. Running requests are never cut.
"""

import ipaddress
from collections import Counter
from typing import Protocol

IPV6_NETWORK_BITS = 64


class Closable(Protocol):
    def close_for_another(self) -> None: ...


class Admission:
    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._open: dict[object, str] = {}
        """Sources by transport: a connection keeps its transport when it becomes a WebSocket."""
        self._open_per_source: Counter[str] = Counter()
        self._idle: dict[Closable, str] = {}
        """Connections without a byte of a request, with their sources, the longest idle first."""
        self._arriving: dict[Closable, str] = {}
        """Connections with an incomplete request head, with their sources."""

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, transport: object, source: str) -> bool:
        """Whether the connection is admitted; the caller refuses one that is not."""
        source_is_full = self._open_per_source[source] >= self._most_per_address
        is_full = source_is_full or len(self._open) >= self._most
        if is_full and not self._make_place(source if source_is_full else None):
            return False
        self._open[transport] = source
        self._open_per_source[source] += 1
        return True

    def leave(self, transport: object) -> None:
        source = self._open.pop(transport, None)
        if source is not None:
            self._open_per_source[source] -= 1
            if not self._open_per_source[source]:
                del self._open_per_source[source]

    def is_idle(self, connection: Closable, source: str) -> None:
        self._arriving.pop(connection, None)
        self._idle.setdefault(connection, source)

    def is_arriving(self, connection: Closable, source: str) -> None:
        self._idle.pop(connection, None)
        self._arriving.setdefault(connection, source)

    def is_busy(self, connection: Closable) -> None:
        """The connection has a request, is closed or has become a WebSocket."""
        self._idle.pop(connection, None)
        self._arriving.pop(connection, None)

    def _make_place(self, source: str | None) -> bool:
        for waiting in (self._idle, self._arriving):
            for connection, its_source in waiting.items():
                if source in (None, its_source):
                    self.is_busy(connection)
                    connection.close_for_another()
                    return True
        return False


def source_of(host: str) -> str:
    """The peer's address. For IPv6 it is the network, since one machine has 2**64 addresses."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        network = ipaddress.ip_network((address, IPV6_NETWORK_BITS), strict=False)
        return str(address.ipv4_mapped or network)
    return str(address)
