"""Checks the addresses to which a request makes this server connect: none may be private."""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from mlx_server import limits
from mlx_server.mcp.errors import McpError
from mlx_server.mcp.special_networks import IPV4, IPV4_MAPPED, IPV6, IPV6_UNICAST, NAT64

RESOLVERS = ThreadPoolExecutor(limits.MCP_RESOLVERS.value, "mcp-resolver")
"""Threads for DNS only, since a lookup may take very long and would block other work."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


async def resolved(host: str, port: int, *, allow_private: bool) -> list[str]:
    """Resolves a host, and checks that its addresses are allowed. Raises McpError.

    The caller must connect to these addresses, since the name may resolve differently a moment
    later.
    """
    try:
        found = await asyncio.get_running_loop().run_in_executor(
            RESOLVERS, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        )
    except (OSError, UnicodeError):
        raise McpError(f"The host {host[:200]!r} was not found.") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not addresses:
        raise McpError(f"The host {host[:200]!r} has no address.")
    if not allow_private and not all(is_public(address) for address in addresses):
        raise McpError(
            f"{host[:200]!r} is in a private network. To allow it, set `server.allow_private_urls` "
            "or a connector's `allow_private` in models.yaml."
        )
    return addresses


def is_public(address: str) -> bool:
    """Whether the address is public. It must be resolved, so that 2130706433 or 0x7f.1 has become
    127.0.0.1."""
    found = _unwrapped(ipaddress.ip_address(address))
    if isinstance(found, ipaddress.IPv4Address):
        return not any(found in network for network in IPV4)
    if found.scope_id is not None:  # a scope id names an interface of this machine
        return False
    return found in IPV6_UNICAST and not any(found in network for network in IPV6)


def is_loopback(host: str) -> bool:
    """Whether the host is this machine, by its name or address alone: it is not resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _unwrapped(address: Address) -> Address:
    """The IPv4 address embedded in an IPv6 address; without one, the address itself."""
    if isinstance(address, ipaddress.IPv4Address) or address.scope_id is not None:
        return address
    if address in IPV4_MAPPED or address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address
