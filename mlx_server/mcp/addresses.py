"""Which addresses a server in a request may have: none that only our own network sees."""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from mlx_server import limits
from mlx_server.mcp.errors import McpError
from mlx_server.mcp.special_networks import IPV4, IPV4_MAPPED, IPV6, IPV6_UNICAST, NAT64

RESOLVERS = ThreadPoolExecutor(limits.MCP_RESOLVERS.value, "mcp-resolver")
"""Apart from the threads that others wait for, since some names take very long."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


async def resolved(host: str, port: int, *, allow_private: bool) -> list[str]:
    """The addresses to connect to, and to no others: a name may mean another one a moment later."""
    try:
        found = await asyncio.get_running_loop().run_in_executor(
            RESOLVERS, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        )
    except (OSError, UnicodeError):
        raise McpError(f"There is no host {host[:200]!r}.") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not addresses:
        raise McpError(f"The host {host[:200]!r} has no address.")
    if not allow_private and not all(is_public(address) for address in addresses):
        raise McpError(
            f"{host[:200]!r} is in this machine's own network; `server.allow_private_urls`, or "
            "`allow_private` of a connector, lets requests go there."
        )
    return addresses


def is_public(address: str) -> bool:
    """Of a resolved one: then 2130706433 and 0x7f.1 have become 127.0.0.1."""
    found = _unwrapped(ipaddress.ip_address(address))
    if isinstance(found, ipaddress.IPv4Address):
        return not any(found in network for network in IPV4)
    if found.scope_id is not None:  # it names an interface of this machine
        return False
    return found in IPV6_UNICAST and not any(found in network for network in IPV6)


def _unwrapped(address: Address) -> Address:
    """The IPv4 address that an IPv6 one leads to, if it does."""
    if isinstance(address, ipaddress.IPv4Address) or address.scope_id is not None:
        return address
    if address in IPV4_MAPPED or address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address
