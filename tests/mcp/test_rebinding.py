"""DNS rebinding, with lookups whose answers change: nothing private is ever connected to."""

import socket
from collections.abc import Sequence
from typing import Any

import pytest

from mlx_server.mcp import addresses
from mlx_server.requests import McpServer
from tests.hostile.outbound import sitecustomize as outbound
from tests.mcp.playing import served
from tests.mcp.wild import Send, Wild, answered, listed, opened, outcome, quiet

pytestmark = pytest.mark.anyio

NAME = "tools.rebound.test"
PUBLIC = "93.184.215.14"


class Names:
    """A `getaddrinfo` that knows one name more."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = addresses
        self.later: Sequence[str] | None = None
        """What takes their place when they have been asked for once."""
        self.lookups = 0
        self._others = socket.getaddrinfo

    def __call__(self, host: Any, *rest: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else str(host)
        if name.rstrip(".").lower() != NAME:
            return self._others(host, *rest, **named)
        self.lookups += 1
        current, self.addresses = self.addresses, self.later or self.addresses
        return [entry for each in current for entry in self._others(each, *rest, **named)]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names([PUBLIC])
    monkeypatch.setattr(socket, "getaddrinfo", names)
    return names


def port_of(url: str) -> str:
    return url.rpartition(":")[2]


async def test_what_is_connected_to_is_the_address_that_was_checked(names: Names) -> None:
    secret = Wild(quiet)
    async with served(secret) as url:
        names.later = ["127.0.0.1"]
        server = McpServer("wild", url=f"http://{NAME}:{port_of(url)}")
        async with opened(server, allow_private_urls=False) as toolset:
            tools, error = listed(toolset)
    assert (tools, names.lookups) == (0, 1)
    assert "can't be reached" in error
    assert secret.heads == []
    (attempt,) = outbound.attempts()  # the network that the tests do not have
    assert attempt.startswith(f"socket.connect '{PUBLIC}'")


@pytest.mark.parametrize("answer", [["127.0.0.1"], [PUBLIC, "127.0.0.1"], [PUBLIC, "::1"]])
async def test_one_private_answer_among_several_is_enough(names: Names, answer: list[str]) -> None:
    names.addresses = answer
    secret = Wild(quiet)
    async with served(secret) as url:
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
@pytest.mark.parametrize("redirects", [False, True])
async def test_every_request_of_a_session_is_checked(names: Names, redirects: bool) -> None:
    async def to_itself(send: Send, id: object) -> None:
        names.addresses = ["127.0.0.1"]
        await answered(send, 307, b"", (b"location", b"/elsewhere"))

    good, secret = Wild(to_itself if redirects else quiet), Wild(quiet)
    names.addresses = ["::1"]
    async with served(good, "::1") as url, served(secret):
        server = McpServer("wild", url=f"http://{NAME}:{port_of(url)}")
        async with opened(server, allow_private_urls=False) as toolset:
            assert listed(toolset) == (1, "")
            if not redirects:
                assert await outcome(toolset) == "seen"
                names.addresses = ["127.0.0.1"]
            assert "private network" in await outcome(toolset)
    assert good.heads
    assert "/elsewhere" not in good.paths
    assert secret.heads == []
