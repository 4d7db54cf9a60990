"""Logins of a connector's owner: what is kept of them, and what a server does with it."""

import asyncio
import json
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_server.mcp import Connector, Connectors, StoredLogin
from mlx_server.mcp.callback import LoginFailed
from mlx_server.mcp.login import LoginClient, Show, log_in
from mlx_server.mcp.login_file import remove
from mlx_server.requests import McpServer
from tests.mcp.authority import Authority, visit
from tests.mcp.playing import all_gone, served
from tests.mcp.test_http import LIMITS, listed, opened, outcome

pytestmark = pytest.mark.anyio

WIKI = McpServer("wild", connector="wiki")


@asynccontextmanager
async def running() -> AsyncIterator[Authority]:
    server = Authority()
    async with served(server) as url:
        server.url = url
        yield server
    await all_gone()


async def logged_in(
    server: Authority, kept: StoredLogin, show: Show = visit, client: LoginClient | None = None
) -> int:
    url = f"{server.url}/mcp"
    return await log_in(url, kept, client or LoginClient(), show, allow_private=True)


def connector(server: Authority, kept: StoredLogin) -> Connector:
    return Connector(url=f"{server.url}/mcp", allow_private=True, oauth=kept)


def change(kept: StoredLogin, **fields: Any) -> None:
    found = json.loads(kept.file.read_text())
    kept.file.write_text(json.dumps({**found, **fields}))


async def said(server: Authority, kept: StoredLogin) -> str:
    """What a tool says, or why there is none."""
    async with opened(WIKI, wiki=connector(server, kept)) as toolset:
        tools, error = listed(toolset)
        return await outcome(toolset) if tools else error


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


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o604])
async def test_a_file_that_others_can_use_is_not_used(kept: StoredLogin, mode: int) -> None:
    async with running() as server:
        await logged_in(server, kept)
        kept.file.chmod(mode)
        assert "not private" in await said(server, kept)
        await logged_in(server, kept)
        assert await said(server, kept) == "seen"


async def test_a_file_that_is_none_of_ours(kept: StoredLogin, tmp_path: Path) -> None:
    async with running() as server:
        await logged_in(server, kept)
        elsewhere = tmp_path / "elsewhere"
        kept.file.rename(elsewhere)
        kept.file.symlink_to(elsewhere)
        assert "can't be read" in await said(server, kept)
        kept.file.unlink()
        kept.file.mkdir(0o700)
        assert "damaged" in await said(server, kept)
        kept.file.rmdir()
        for text in ("{", "[]", '{"url": 1}', "x" * (1 << 20) + "x"):
            kept.file.touch(0o600)
            kept.file.write_text(text)
            assert "damaged" in await said(server, kept)


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
