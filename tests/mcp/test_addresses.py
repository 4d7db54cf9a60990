"""Where a URL in a request may lead."""

import asyncio
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server.mcp.addresses import is_public, resolved
from mlx_server.mcp.limits import McpError
from tests.tables import cases


@cases
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "255.255.255.255", "224.0.0.1", "192.0.2.1"),
        *("192.0.0.1", "192.0.0.9", "192.0.0.192", "192.88.99.1", "198.18.0.1", "198.19.255.255"),
        *("198.51.100.1", "203.0.113.1", "239.255.255.255", "240.0.0.1"),
        *("::1", "::", "fe80::1", "fe80::1%1", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
        *("fec0::1", "5f00::1", "3fff::1", "3fff:fff:ffff::1", "100::1", "100:0:0:1::1", "4000::"),
        *("2001::1", "2001:2::1", "2001:20::1", "2001:1ff:ffff::1", "1fff::1"),
        "2606:4700::1111%1",
        # the IPv4 address in them, or none that can be known
        *("::ffff:127.0.0.1", "::ffff:a00:1", "::ffff:192.0.0.192", "64:ff9b::7f00:1"),
        *("64:ff9b::c0a8:101", "64:ff9b:1::1", "64:ff9b:1::808:808", "::ffff:0:7f00:1"),
        *("::ffff:0:808:808", "2002:7f00:1::", "2002:808:808::1", "::127.0.0.1", "::8.8.8.8"),
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
)
def test_addresses_that_only_our_own_network_sees(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "::1", "::ffff:7f00:1"),
        *("0", "0x7f.1", "017700000001", "::ffff:0:7f00:1", "fe80::1%lo"),
    ],
)
def test_a_name_or_another_form_of_such_an_address_is_refused(host: str) -> None:
    with pytest.raises(McpError, match=r"allow_private_urls|was not found"):
        asyncio.run(resolved(host, 80, allow_private=False))
    if host == "localhost":
        found = asyncio.run(resolved(host, 80, allow_private=True))
        assert set(found) <= {"127.0.0.1", "::1"}


@pytest.mark.usefixtures("_may_connect")
@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 300, "ä" * 70 + ".example", ""])
def test_a_host_that_is_not_there(host: str) -> None:
    with pytest.raises(McpError):
        asyncio.run(resolved(host, 80, allow_private=False))


@pytest.mark.parametrize("wrapper", ["::ffff:0:0", "64:ff9b::"])
@settings(max_examples=30)
@given(address=st.ip_addresses(v=4))
def test_an_embedded_address_counts_as_itself(wrapper: str, address: IPv4Address) -> None:
    wrapped = IPv6Address(int(IPv6Address(wrapper)) | int(address))
    assert is_public(str(wrapped)) == is_public(str(address))
