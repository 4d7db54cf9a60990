"""Networks without public servers, from IANA's registries of special-purpose addresses.

https://www.iana.org/assignments/iana-ipv4-special-registry
https://www.iana.org/assignments/iana-ipv6-special-registry

They are listed here since the standard library's table differs between its patch releases. All
entries are listed, even those that the registries call globally reachable: those addresses belong
to protocols (relays, sinks, anycast of the nearest router), not to MCP servers.
"""

from ipaddress import IPv4Network, IPv6Network

IPV4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private use
        "100.64.0.0/10",  # shared by a provider's customers
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local, and the metadata services of clouds
        "172.16.0.0/12",  # private use
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # multicast tunnels
        "192.88.99.0/24",  # 6to4 relays, deprecated
        "192.168.0.0/16",  # private use
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)

IPV6_UNICAST = IPv6Network("2000::/3")
"""The global unicast space that IANA allocates from; every other IPv6 network is special."""

IPV6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID, drones' ids
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: it leads to an IPv4 address
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)
"""The special networks within `IPV6_UNICAST`."""

IPV4_MAPPED = IPv6Network("::ffff:0:0/96")
"""Addresses for which the operating system connects to the embedded IPv4 address."""

NAT64 = IPv6Network("64:ff9b::/96")
"""Addresses through which a network without IPv4 reaches the embedded IPv4 address. The local-use
prefix 64:ff9b:1::/48 is not unwrapped, since only its own network knows where it leads."""
