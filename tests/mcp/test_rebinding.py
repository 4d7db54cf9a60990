"""DNS rebinding, with a name server whose answers change: nothing private is ever connected to."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mlx_server.mcp import addresses
from mlx_server.requests import McpServer
from tests.hostile.outbound import sitecustomize as outbound
from tests.mcp.names import OURS, NameServer, naming
from tests.mcp.playing import served
from tests.mcp.wild import Send, Wild, answered, listed, opened, outcome, quiet

pytestmark = pytest.mark.anyio

NAME = f"tools{OURS}"
PUBLIC = "93.184.215.14"


@asynccontextmanager
async def rebinding(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> AsyncIterator[NameServer]:
    async with naming() as (names, getaddrinfo):
        names.addresses = addresses
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        yield names


def port_of(url: str) -> str:
    return url.rpartition(":")[2]


async def test_what_is_connected_to_is_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = Wild(quiet)
    async with served(secret) as url, rebinding(monkeypatch, PUBLIC) as names:
        names.later = ["127.0.0.1"]
        server = McpServer("wild", url=f"http://{NAME}:{port_of(url)}")
        async with opened(server, allow_private_urls=False) as toolset:
            tools, error = listed(toolset)
    assert (tools, names.lookups) == (0, 1)
    assert "can't be reached" in error
    assert secret.heads == []
    (attempt,) = outbound.attempts()  # the network that the tests do not have
    assert attempt.startswith(f"socket.connect '{PUBLIC}'")


@pytest.mark.slow
@pytest.mark.parametrize("answer", [["127.0.0.1"], [PUBLIC, "127.0.0.1"], [PUBLIC, "::1"]])
async def test_one_private_answer_among_several_is_enough(
    monkeypatch: pytest.MonkeyPatch, answer: list[str]
) -> None:
    secret = Wild(quiet)
    async with served(secret) as url, rebinding(monkeypatch, *answer):
        for name in (NAME, f"{NAME}.", NAME.upper()):
            server = McpServer("wild", url=f"http://{name}:{port_of(url)}")
            async with opened(server, allow_private_urls=False) as toolset:
                assert "private network" in listed(toolset)[1]
    assert secret.heads == []


@pytest.fixture
def _six_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two loopback addresses, ::1 stands for one in the internet."""
    known = addresses.is_public
    monkeypatch.setattr(addresses, "is_public", lambda each: each == "::1" or known(each))


@pytest.mark.usefixtures("_six_is_public")
async def test_every_request_of_a_session_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    good, secret = Wild(quiet), Wild(quiet)
    async with (
        served(good, "::1") as url,
        served(secret),
        rebinding(monkeypatch, "::1") as names,
    ):
        server = McpServer("wild", url=f"http://{NAME}:{port_of(url)}")
        async with opened(server, allow_private_urls=False) as toolset:
            assert await outcome(toolset) == "seen"
            names.addresses = ["127.0.0.1"]
            assert "private network" in await outcome(toolset)
    assert good.heads
    assert secret.heads == []


@pytest.mark.usefixtures("_six_is_public")
async def test_a_redirect_is_looked_up_and_checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def to_itself(send: Send, id: object) -> None:
        names.addresses = ["127.0.0.1"]
        await answered(send, 307, b"", (b"location", b"/elsewhere"))

    good, secret = Wild(to_itself), Wild(quiet)
    async with (
        served(good, "::1") as url,
        served(secret),
        rebinding(monkeypatch, "::1") as names,
    ):
        server = McpServer("wild", url=f"http://{NAME}:{port_of(url)}")
        async with opened(server, allow_private_urls=False) as toolset:
            assert listed(toolset) == (1, "")
            assert "private network" in await outcome(toolset)
    assert "/elsewhere" not in good.paths
    assert secret.heads == []
