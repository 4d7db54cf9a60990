"""How many connections there may be, in total and from one address.

When there is no place, one that waits for a request is closed for a newcomer: first one on which
nothing has arrived, then one on which a head is still arriving. Requests are never cut for others.
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
        """The source of each, by its transport, which stays when a WebSocket takes over."""
        self._open_per_source: Counter[str] = Counter()
        self._idle: dict[Closable, str] = {}
        """Those without a byte of a request, the longest idle first."""
        self._arriving: dict[Closable, str] = {}
        """Those with the beginning of a request's head."""

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, transport: object, source: str) -> bool:
        """Whether it may stay; one that may not is the caller's to refuse."""
        is_much = self._open_per_source[source] >= self._most_per_address
        is_full = len(self._open) >= self._most
        if (is_much or is_full) and not self._make_place(source if is_much else None):
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
        """Or closed, or taken over."""
        self._idle.pop(connection, None)
        self._arriving.pop(connection, None)

    def close_one(self) -> bool:
        return self._make_place(None)

    def _make_place(self, source: str | None) -> bool:
        for waiting in (self._idle, self._arriving):
            for connection, its_source in waiting.items():
                if source in (None, its_source):
                    self.is_busy(connection)
                    connection.close_for_another()
                    return True
        return False


def source_of(host: str) -> str:
    """The address of who connected. Of IPv6 its network, since one machine has 2**64 addresses."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        network = ipaddress.ip_network((address, IPV6_NETWORK_BITS), strict=False)
        return str(address.ipv4_mapped or network)
    return str(address)
