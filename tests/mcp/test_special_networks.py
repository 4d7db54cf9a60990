"""No address that the standard library knows to be special is taken for a public one."""

import ipaddress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server.mcp.addresses import is_public
from mlx_server.mcp.special_networks import IPV4, IPV4_MAPPED, IPV6, IPV6_UNICAST, NAT64

EMBEDDING = IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96")
"""Mapped addresses, and those of NAT64."""

SOME_PRIVATE = IPv4Address("10.1.2.3")


def is_special(address: IPv4Address | IPv6Address) -> bool:
    """Whether the standard library says so. Its versions differ in whether they say it of addresses
    that lead to an embedded one, which count as that one here."""
    return not any(address in network for network in EMBEDDING) and (
        not address.is_global
        or address.is_multicast
        or address.is_reserved
        or address.is_loopback
        or address.is_link_local
        or address.is_unspecified
    )


def networks_of(constants: Any) -> list[Any]:
    """The networks of the standard library's own table."""
    found = [each for each in vars(constants).values() if hasattr(each, "network_address")]
    lists = [each for each in vars(constants).values() if isinstance(each, list)]
    return found + [network for each in lists for network in each]


KNOWN_V4 = networks_of(ipaddress._IPv4Constants)  # type: ignore[attr-defined]
KNOWN_V6 = networks_of(ipaddress._IPv6Constants)  # type: ignore[attr-defined]
SPECIAL_V4 = [each for each in KNOWN_V4 if is_special(each.network_address)]
SPECIAL_V6 = [each for each in KNOWN_V6 if is_special(each.network_address)]


def inside(network: IPv4Network | IPv6Network) -> list[IPv4Address | IPv6Address]:
    """Its first, its last and its middle address."""
    return [network[0], network[-1], network[network.num_addresses // 2]]


@pytest.mark.parametrize("network", SPECIAL_V4 + SPECIAL_V6, ids=str)
def test_a_network_of_the_standard_librarys_table_is_not_public(network: Any) -> None:
    assert not [each for each in inside(network) if is_special(each) and is_public(str(each))]


def test_the_standard_library_knows_some() -> None:
    assert len(SPECIAL_V4) > 10
    assert len(SPECIAL_V6) > 5


@settings(max_examples=50)
@given(st.ip_addresses())
def test_no_special_address_is_public(address: IPv4Address | IPv6Address) -> None:
    assert not (is_special(address) and is_public(str(address)))


@pytest.mark.parametrize("network", [*IPV4, *IPV6], ids=str)
def test_every_listed_network_is_closed_from_end_to_end(network: Any) -> None:
    assert not [each for each in inside(network) if is_public(str(each))]


@pytest.mark.parametrize("wrapper", EMBEDDING, ids=str)
@settings(max_examples=30)
@given(address=st.ip_addresses(v=4))
def test_an_embedded_address_counts_as_itself(wrapper: IPv6Network, address: IPv4Address) -> None:
    wrapped = IPv6Address(int(wrapper.network_address) | int(address))
    assert is_public(str(wrapped)) == is_public(str(address))


@pytest.mark.parametrize("form", ["2002:_::", "64:ff9b:1::_", "64:ff9b::1:_", "::fffe:_", "::_"])
@pytest.mark.parametrize("address", [SOME_PRIVATE, IPv4Address("8.8.8.8")])
def test_other_embedded_addresses_are_never_public(form: str, address: IPv4Address) -> None:
    digits = f"{int(address):08x}"
    assert not is_public(form.replace("_", f"{digits[:4]}:{digits[4:]}"))


def test_no_entry_is_without_effect() -> None:
    assert not [one for one, other in combinations(IPV4, 2) if one.overlaps(other)]
    assert not [one for one, other in combinations(IPV6, 2) if one.overlaps(other)]
    assert all(network.subnet_of(IPV6_UNICAST) for network in IPV6)
    assert not IPV4_MAPPED.overlaps(IPV6_UNICAST)
    assert not NAT64.overlaps(IPV6_UNICAST)
