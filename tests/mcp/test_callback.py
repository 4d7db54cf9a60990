"""The page to which a login returns, and answers that are none."""

import socket
import urllib.error
from urllib.parse import urlsplit

import pytest

from mlx_server.mcp import StoredLogin
from mlx_server.mcp.callback import LoginFailed
from mlx_server.mcp.login import LoginClient
from tests.mcp.authority import callback_of, visit
from tests.mcp.logins import logged_in, running

pytestmark = pytest.mark.anyio


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


@pytest.mark.parametrize("noise", [b"", b"GET /callback", b"x" * 40_000])
async def test_what_is_no_answer_does_not_end_a_login(kept: StoredLogin, noise: bytes) -> None:
    def show(page: str) -> None:
        parts = urlsplit(callback_of(page))
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as line:
            line.sendall(noise)
        visit(page)

    async with running() as server:
        assert await logged_in(server, kept, show) == 1


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"\0\xff", b"404"),
        (b"POST / x", b"404"),
        (b"GET http://[", b"404"),
        (b"GET //[/callback HTTP/1.1", b"404"),
        (b"GET http://a\xe2\x84\x80b/callback HTTP/1.1", b"404"),
        (b"HEAD /callback?state=x HTTP/1.1", b"404"),
        (b"POST /callback?state=x HTTP/1.1", b"404"),
        (b"GET /callback/../x?state=x HTTP/1.1", b"404"),
        (b"GET /callback?" + b"state=x&" * 1500 + b" HTTP/1.1", b"400"),
        (b"GET /callback?state=%ED%A0%80 HTTP/1.1", b"400"),
        (b"GET /callback?state=<script>alert(1)</script> HTTP/1.1", b"400"),
    ],
)
async def test_any_request_gets_an_answer(
    kept: StoredLogin, request_line: bytes, status: bytes
) -> None:
    answers = []

    def show(page: str) -> None:
        parts = urlsplit(callback_of(page))
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as line:
            line.sendall(request_line + b"\r\n\r\n")
            answers.append(b"".join(iter(lambda: line.recv(4096), b"")))
        visit(page)

    async with running() as server:
        assert await logged_in(server, kept, show) == 1
    assert answers[0].startswith(b"HTTP/1.1 " + status)
    assert b"<script>" not in answers[0]


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


async def test_a_port_that_is_taken(kept: StoredLogin) -> None:
    async with running() as server:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            client = LoginClient(port=taken.getsockname()[1])
            with pytest.raises(LoginFailed, match="can't be listened on"):
                await logged_in(server, kept, client=client)


async def test_a_login_that_is_not_finished_in_time(
    kept: StoredLogin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_server.mcp.callback.WAIT_SECONDS", 0.01)
    async with running() as server:
        with pytest.raises(LoginFailed, match="not finished in time"):
            await logged_in(server, kept, show=lambda page: None)
