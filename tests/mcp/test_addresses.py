"""Where a URL in a request may lead."""

import asyncio
import socket

import pytest

from mlx_server.mcp.addresses import is_public, resolved
from mlx_server.mcp.errors import McpError


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "255.255.255.255", "224.0.0.1", "192.0.2.1"),
        *("::1", "::", "fe80::1", "fe80::1%1", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:a00:1", "64:ff9b::7f00:1", "2002:7f00:1::"),
        "::127.0.0.1",
    ],
)
def test_addresses_that_only_our_own_network_sees(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "::1", "::ffff:7f00:1", "0"],
)
def test_a_name_or_another_form_of_such_an_address_is_refused(host: str) -> None:
    with pytest.raises(McpError, match=r"allow_private_urls|There is no host"):
        asyncio.run(resolved(host, 80, allow_private=False))
    if host == "localhost":
        found = asyncio.run(resolved(host, 80, allow_private=True))
        assert set(found) <= {"127.0.0.1", "::1"}


def test_a_name_with_a_public_and_a_private_address_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = [(socket.AF_INET, 1, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with pytest.raises(McpError, match="own network"):
        asyncio.run(resolved("rebound.example", 80, allow_private=False))


@pytest.mark.usefixtures("_may_connect")
@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 300, "ä" * 70 + ".example", ""])
def test_a_host_that_is_not_there(host: str) -> None:
    with pytest.raises(McpError):
        asyncio.run(resolved(host, 80, allow_private=False))
