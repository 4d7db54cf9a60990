"""Logins of a connector's owner: what is kept of them, and what a server does with it."""

import asyncio
import json
import stat
import time
from typing import Any

import pytest

from mlx_server.mcp import Connectors, StoredLogin
from mlx_server.mcp.callback import LoginFailed
from mlx_server.mcp.login import LoginClient
from mlx_server.mcp.login_file import remove
from tests.mcp.logins import WIKI, connector, logged_in, running, said
from tests.mcp.wild import LIMITS, outcome

pytestmark = pytest.mark.anyio


def change(kept: StoredLogin, **fields: Any) -> None:
    found = json.loads(kept.file.read_text())
    kept.file.write_text(json.dumps({**found, **fields}))


async def test_a_login_is_kept_and_used(kept: StoredLogin) -> None:
    async with running() as server:
        assert await logged_in(server, kept) == 1
        assert await said(server, kept) == "seen"
    (asked,) = server.asked
    assert asked["resource"] == f"{server.url}/mcp"
    assert asked["grant_type"] == "authorization_code"
    assert server.pages[0]["code_challenge_method"] == "S256"
    assert server.pages[0]["scope"] == "read"
    (client,) = server.registered
    assert client["client_name"] == "mlx-server"
    assert stat.S_IMODE(kept.file.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.file.parent.stat().st_mode) == 0o700
    assert [each.name for each in kept.file.parent.iterdir()] == ["wiki%2F1.json"]


async def test_an_old_token_is_refreshed_once_for_all_connections(kept: StoredLogin) -> None:
    async with running() as server:
        await logged_in(server, kept)
        change(kept, expires_at=time.time() - 1)
        found = Connectors({"wiki": connector(server, kept)}, limits=LIMITS)

        async def one() -> str:
            async with found.open([WIKI]) as toolset:
                return await outcome(toolset)

        assert list(await asyncio.gather(one(), one(), one())) == ["seen"] * 3
        assert server.grants == ["authorization_code", "refresh_token"]
        tokens = json.loads(kept.file.read_text())["tokens"]
        assert tokens["refresh_token"] == "refresh-2"
        assert stat.S_IMODE(kept.file.stat().st_mode) == 0o600
        await found.stop()


async def test_a_token_that_is_refused_is_refreshed(kept: StoredLogin) -> None:
    async with running() as server:
        await logged_in(server, kept)
        server.access.clear()
        assert await said(server, kept) == "seen"
        assert server.grants == ["authorization_code", "refresh_token"]


async def test_a_login_that_has_ended_needs_the_owner(kept: StoredLogin) -> None:
    async with running() as server:
        await logged_in(server, kept)
        server.access.clear()
        server.refresh.clear()
        error = await said(server, kept)
        assert "`mlx-server connectors login wiki`" in error
        assert len(server.registered) == len(server.pages) == 1
        await logged_in(server, kept)
        assert await said(server, kept) == "seen"


async def test_without_a_login_nothing_is_sent(kept: StoredLogin) -> None:
    async with running() as server:
        assert "connectors login wiki" in await said(server, kept)
        assert server.heads == []
        await logged_in(server, kept)
        assert remove(kept.file)
        assert not remove(kept.file)
        assert "connectors login wiki" in await said(server, kept)


async def test_tokens_are_for_one_server(kept: StoredLogin) -> None:
    async with running() as server, running() as other:
        await logged_in(server, kept)
        assert "connectors login wiki" in await said(other, kept)
        assert other.heads == []


async def test_a_page_that_is_not_https_is_not_shown(kept: StoredLogin) -> None:
    async with running() as server:
        server.page_of = lambda url: "http://login.example.com/authorize"
        with pytest.raises(LoginFailed, match="not https"):
            await logged_in(server, kept)


async def test_a_scope_that_a_server_wants_is_asked_for_at_the_next_login(
    kept: StoredLogin,
) -> None:
    async with running() as server:
        await logged_in(server, kept)
        server.scope_needed = "write"
        assert "connectors login wiki" in await said(server, kept)
        server.scope_needed = None
        await logged_in(server, kept)
    assert server.pages[-1]["scope"].split() == ["read", "write"]


async def test_a_client_that_is_registered_already(kept: StoredLogin) -> None:
    async with running() as server:
        client = LoginClient("mine", "hush", server.url)
        assert await logged_in(server, kept, client=client) == 1
        assert server.registered == []
        assert server.pages[0]["client_id"] == "mine"


async def test_the_secret_is_for_its_issuer(kept: StoredLogin) -> None:
    async with running() as server:
        client = LoginClient("mine", "hush", "https://login.example.com")
        await logged_in(server, kept, client=client)
    assert "hush" not in str([server.asked, server.pages, server.registered])
    assert "hush" not in kept.file.read_text()


async def test_a_server_that_asks_for_no_login(kept: StoredLogin) -> None:
    async with running() as server:
        server.access.add("")
        with pytest.raises(LoginFailed, match="asks for no login"):
            await logged_in(server, kept)
