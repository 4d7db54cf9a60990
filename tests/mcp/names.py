"""A name server on loopback whose answers change from one question to the next."""

import asyncio
import ipaddress
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

A, AAAA = 1, 28
HEADER = struct.Struct("!6H")
OURS = ".rebound.test"


class NameServer(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.lookups = 0
        self.addresses: Sequence[str] = ()
        """Of every name."""
        self.later: Sequence[str] | None = None
        """What takes their place when they have been asked for once."""
        self._current: Sequence[str] = ()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, sender: Any) -> None:
        (id, *_), question = HEADER.unpack_from(data), data[HEADER.size :]
        (kind,) = struct.unpack_from("!H", question, len(question) - 4)
        if kind == A:  # which is asked for first
            self.lookups += 1
            self._current = self.addresses
            self.addresses = self.addresses if self.later is None else self.later
        found = [ipaddress.ip_address(address) for address in self._current]
        records = [
            struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(address.packed)) + address.packed
            for address in found
            if kind == (A if address.version == 4 else AAAA)
        ]
        head = HEADER.pack(id, 0x8180, 1, len(records), 0, 0)
        self._transport.sendto(head + question + b"".join(records), sender)


@asynccontextmanager
async def naming() -> AsyncIterator[tuple[NameServer, Callable[..., Any]]]:
    """A name server, and a getaddrinfo that asks it about names that end in `OURS`."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, ("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    others = socket.getaddrinfo

    def getaddrinfo(host: Any, service: Any, *rest: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if not isinstance(name, str) or not name.rstrip(".").endswith(OURS):
            return others(host, service, *rest, **named)
        addresses = [each for kind in (A, AAAA) for each in _asked(port, name, kind)]
        return [entry for each in addresses for entry in others(each, service, *rest, **named)]

    try:
        yield server, getaddrinfo
    finally:
        transport.close()


def _asked(port: int, name: str, kind: int) -> Iterator[str]:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.rstrip(".").split("."))
    question = labels + b"\0" + struct.pack("!HH", kind, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(10)
        asking.sendto(HEADER.pack(7, 0x0100, 1, 0, 0, 0) + question, ("127.0.0.1", port))
        answer = asking.recv(512)
    size = 4 if kind == A else 16
    count, place = HEADER.unpack_from(answer)[3], HEADER.size + len(question) + 12
    for _ in range(count):
        yield str(ipaddress.ip_address(answer[place : place + size]))
        place += size + 12
