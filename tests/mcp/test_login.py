"""Logins of a connector's owner: the page to which they return, what is kept of them, and what a
server does with it; and connectors with OAuth's client credentials."""

import asyncio
import base64
import json
import socket
import stat
import urllib.error
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from mlx_server.mcp import ClientCredentials, Connector, Connectors, StoredLogin
from mlx_server.mcp.oauth import LoginFailed, Show, log_in
from mlx_server.requests import McpServer
from tests.mcp.authority import Authority, callback_of, visit
from tests.mcp.playing import all_gone, served
from tests.mcp.wild import Wild, listed, opened, outcome, quiet

pytestmark = pytest.mark.anyio

WIKI = McpServer("wild", connector="wiki")


@pytest.fixture
def kept(tmp_path: Path) -> StoredLogin:
    return StoredLogin.in_folder(tmp_path, "wiki/1")


@asynccontextmanager
async def running() -> AsyncIterator[Authority]:
    server = Authority()
    async with served(server) as url:
        server.url = url
        yield server
    await all_gone()


async def logged_in(
    server: Authority,
    kept: StoredLogin,
    show: Show = visit,
    client: ClientCredentials | None = None,
    port: int = 0,
) -> int:
    url = f"{server.url}/mcp"
    return await log_in(url, kept, client, show, port=port, allow_private=True)


def connector(server: Authority, kept: StoredLogin) -> Connector:
    return Connector(url=f"{server.url}/mcp", allow_private=True, oauth=kept)


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


async def test_a_refused_token_is_refreshed_once_for_all_connections(kept: StoredLogin) -> None:
    async with running() as server:
        await logged_in(server, kept)
        server.access.clear()
        found = Connectors({"wiki": connector(server, kept)})

        async def one() -> str:
            async with found.open([WIKI]) as toolset:
                return await outcome(toolset)

        assert list(await asyncio.gather(one(), one(), one())) == ["seen"] * 3
        assert server.grants == ["authorization_code", "refresh_token"]
        tokens = json.loads(kept.file.read_text())["tokens"]
        assert tokens["refresh_token"] == "refresh-2"
        assert stat.S_IMODE(kept.file.stat().st_mode) == 0o600
        await found.stop()


async def test_a_login_that_has_ended_needs_the_owner(kept: StoredLogin) -> None:
    async with running() as server:
        await logged_in(server, kept)
        server.access.clear()
        server.refresh.clear()
        error = await said(server, kept)
        assert "`mlx-server connectors login wiki/1`" in error
        assert len(server.registered) == len(server.pages) == 1
        await logged_in(server, kept)
        assert await said(server, kept) == "seen"


async def test_without_a_login_nothing_is_sent(kept: StoredLogin) -> None:
    async with running() as server:
        assert "connectors login wiki" in await said(server, kept)
        assert server.heads == []
        await logged_in(server, kept)
        assert kept.forget()
        assert not kept.forget()
        assert "connectors login wiki" in await said(server, kept)


async def test_tokens_are_for_one_server(kept: StoredLogin) -> None:
    async with running() as server, running() as other:
        await logged_in(server, kept)
        assert "connectors login wiki" in await said(other, kept)
        assert other.heads == []


@pytest.mark.slow
@pytest.mark.parametrize("id", [None, "mine"])
async def test_the_refresh_token_is_for_the_authority_of_the_login(
    kept: StoredLogin, id: str | None
) -> None:
    async with running() as server, running() as other:
        client = ClientCredentials(None, id) if id else None
        await logged_in(server, kept, client=client)
        server.access.clear()
        server.issuer = other.url
        assert "connectors login wiki" in await said(server, kept)
        assert other.asked == []
        server.issuer = ""
        assert await said(server, kept) == "seen"


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


async def test_the_secret_is_for_its_issuer(kept: StoredLogin) -> None:
    async with running() as server:
        client = ClientCredentials("https://login.example.com", "mine", "hush")
        await logged_in(server, kept, client=client)
    assert "hush" not in str([server.asked, server.pages, server.registered])
    assert "hush" not in kept.file.read_text()


async def test_an_answer_with_another_state_is_refused_and_the_login_goes_on(
    kept: StoredLogin,
) -> None:
    refused = []

    def show(page: str) -> None:
        for forged in ("code=evil&state=x", "code=evil", "error=no&state=", "", "%ff=%ff"):
            with pytest.raises(urllib.error.HTTPError) as found:
                visit(f"{callback_of(page)}?{forged}")
            found.value.close()
            refused.append(found.value.code)
        visit(page)

    async with running() as server:
        assert await logged_in(server, kept, show) == 1
    assert refused == [400] * 5
    assert server.asked[0]["code"] == "a-code"


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_line",
    [
        b"\0\xff",
        b"x" * 40_000,
        b"GET //[/callback HTTP/1.1",
        b"POST /callback?state=x HTTP/1.1",
        b"GET /callback?" + b"state=x&" * 1500 + b" HTTP/1.1",
        b"GET /callback?state=%ED%A0%80 HTTP/1.1",
        b"GET /callback?state=<script>alert(1)</script> HTTP/1.1",
    ],
)
async def test_no_other_request_ends_a_login(kept: StoredLogin, request_line: bytes) -> None:
    answers = []

    def show(page: str) -> None:
        parts = urlsplit(callback_of(page))
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as line:
            line.sendall(request_line + b"\r\n\r\n")
            answers.append(b"".join(iter(lambda: line.recv(4096), b"")))
        visit(page)

    async with running() as server:
        assert await logged_in(server, kept, show) == 1
    assert b"<script>" not in answers[0].partition(b"\r\n\r\n")[2]
    assert b" 200 " not in answers[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            {"error": "access_denied", "error_description": "No\x1b[2J way."},
            "access_denied: No[2J way.",
        ),
        ({"error": "x" * 10_000}, "cut here"),
        ({}, "neither a code nor an error"),
        ({"code": "a-code", "iss": "https://evil.example.com"}, "evil.example.com"),
        ({"code": "another"}, "invalid_grant"),
    ],
)
async def test_a_login_that_is_refused_keeps_nothing(
    kept: StoredLogin, answer: dict[str, str], said: str
) -> None:
    async with running() as server:
        server.answer = lambda asked: answer
        with pytest.raises(LoginFailed) as failed:
            await logged_in(server, kept)
    assert said in str(failed.value)
    assert "\x1b" not in str(failed.value)
    assert not kept.file.exists()


async def test_a_login_that_is_not_finished_in_time(
    kept: StoredLogin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_server.mcp.oauth.LOGIN_SECONDS", 0.01)
    async with running() as server:
        with pytest.raises(LoginFailed, match="not finished in time"):
            await logged_in(server, kept, show=lambda page: None)


@pytest.mark.slow
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
        kept.file.symlink_to(elsewhere)  # the owner's own link
        assert await said(server, kept) == "seen"
        kept.file.unlink()
        kept.file.mkdir(0o700)
        assert "can't be read" in await said(server, kept)
        kept.file.rmdir()
        for text in ("{", "[]", '{"url": 1}', "x" * (1 << 20) + "x"):
            kept.file.touch(0o600)
            kept.file.write_text(text)
            assert "damaged" in await said(server, kept)


def with_credentials(
    server: Authority, url: str, secret: str, issuer: str | None = None
) -> Connector:
    server.url, server.issuer = url, f"{url}/"
    credentials = ClientCredentials(issuer or server.issuer, "me", secret)
    return Connector(url=f"{url}/mcp", allow_private=True, oauth=credentials)


async def test_a_token_is_asked_for_once_and_again_when_it_is_refused() -> None:
    server = Authority()
    async with served(server) as url:
        connectors = Connectors({"wiki": with_credentials(server, url, "once")})
        wiki = McpServer("wild", connector="wiki", authorization="the client's")
        for _ in range(2):
            async with connectors.open([wiki]) as toolset:
                assert listed(toolset) == (["look"], "")
                assert await outcome(toolset) == "seen"
        assert len(server.asked) == 1
        server.access.clear()
        async with connectors.open([wiki]) as toolset:
            assert await outcome(toolset) == "seen"
        await connectors.stop()
    assert server.credentials == [f"Basic {base64.b64encode(b'me:once').decode()}"] * 2
    assert server.grants == ["client_credentials"] * 2


async def test_a_token_is_sent_to_the_server_that_it_is_for() -> None:
    """Not to another one that the owner has registered with the same credentials."""
    guarded, other = Authority(), Wild(quiet)
    async with served(guarded) as url, served(other) as elsewhere:
        made = with_credentials(guarded, url, "shared")
        async with opened(WIKI, wiki=made) as toolset:
            assert await outcome(toolset) == "seen"
        curious = Connector(url=f"{elsewhere}/mcp", allow_private=True, oauth=made.oauth)
        async with opened(WIKI, wiki=curious) as toolset:
            assert await outcome(toolset) == "seen"
    assert len(guarded.asked) == 1
    assert not any("authorization" in head for head in other.heads)


async def test_no_other_server_gets_the_secret() -> None:
    server = Authority()
    async with served(server) as url:
        made = with_credentials(server, url, "mine", issuer="https://login.example.com")
        async with opened(WIKI, wiki=made) as toolset:
            tools, error = listed(toolset)
    assert (tools, server.asked) == ([], [])
    assert error
