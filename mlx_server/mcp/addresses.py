"""Checks the addresses to which a request makes this server connect: none may be private."""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

from mlx_server.mcp.limits import McpError

RESOLVERS = ThreadPoolExecutor(8, "mcp-resolver")
"""Threads for DNS only, since a lookup may take very long and would block other work."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""The IPv6 addresses that IANA allocates to networks."""

EMBEDDING = ipaddress.IPv6Network("::ffff:0:0/96"), ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that lead to the IPv4 address in their last 32 bits: mapped ones and NAT64's."""

SPECIAL = (
    *(ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("192.88.99.0/24")),
    *(ipaddress.ip_network("2001::/23"), ipaddress.ip_network("3fff::/20")),
)
"""Addresses of protocols and documents, which only some patch releases of Python call special."""


async def resolved(host: str, port: int, *, allow_private: bool) -> list[str]:
    """Resolves a host, and checks that its addresses are allowed. Raises McpError.

    The caller must connect to these addresses, since the name may resolve differently a moment
    later.
    """
    try:
        entries = await asyncio.get_running_loop().run_in_executor(
            RESOLVERS, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        )
    except (OSError, UnicodeError):
        raise McpError(f"The host {host[:200]!r} was not found.") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    if not addresses:
        raise McpError(f"The host {host[:200]!r} has no address.")
    if not allow_private and not all(is_public(address) for address in addresses):
        raise McpError(
            f"{host[:200]!r} is in a private network. To allow it, set `server.allow_private_urls` "
            "in models.yaml, or name its address in a connector's `url`."
        )
    return addresses


def is_public(address: str) -> bool:
    """Whether the address is public. It must be resolved, so that 2130706433 or 0x7f.1 has become
    127.0.0.1."""
    target = _unwrapped(ipaddress.ip_address(address))
    if not target.is_global or target.is_multicast or any(target in network for network in SPECIAL):
        return False
    if isinstance(target, ipaddress.IPv4Address):
        return True
    # a scope id names an interface of this machine, and 6to4 leads to an IPv4 address
    return target.scope_id is None and target in GLOBAL_UNICAST and target.sixtofour is None


def names_private_host(url: str) -> bool:
    """Whether the URL itself shows that its host is private, so that its author knows."""
    host = urlsplit(url).hostname or ""
    if host.endswith((".local", ".internal", ".lan", ".localhost")):
        return True
    try:
        return host == "localhost" or not is_public(host)
    except ValueError:
        return False


def _unwrapped(address: Address) -> Address:
    """The IPv4 address embedded in an IPv6 address; without one, the address itself."""
    if isinstance(address, ipaddress.IPv4Address) or address.scope_id is not None:
        return address
    if any(address in network for network in EMBEDDING):
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address
