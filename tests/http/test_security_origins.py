"""Pages of which origins may use the server."""

import pytest
from starlette.types import Receive, Scope, Send

from mlx_server.errors import SettingsError
from tests.http.gate import HOST, Header, Inner, a_gate, call

PAGE = "https://page.example"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 200),
        ([("origin", "http://localhost:8000")], 200),
        ([("origin", "HTTP://LOCALHOST:8000")], 200),
        ([("origin", "https://localhost:8000")], 403),
        ([("origin", "http://localhost")], 403),
        ([("origin", "http://localhost:3000")], 403),
        ([("origin", "http://127.0.0.1:8000")], 403),
        ([("origin", "http://localhost:8000.evil.com")], 403),
        ([("origin", "http://evil.com")], 403),
        ([("origin", "null")], 403),
        ([("origin", "")], 403),
        ([("origin", "*")], 403),
        ([("origin", PAGE)], 200),
        ([("origin", f"{PAGE}:444")], 403),
        ([("origin", f"{PAGE}/")], 403),
        ([("origin", "http://page.example")], 403),
        ([("origin", "https://sub.page.example")], 403),
        ([("origin", "tauri://localhost")], 200),
        ([("origin", PAGE), ("origin", "http://evil.com")], 403),
        ([("origin", "http://localhost:8000"), ("origin", PAGE)], 403),
        ([("origin", PAGE), ("sec-fetch-site", "cross-site")], 200),
        ([("sec-fetch-site", "cross-site")], 403),
        ([("sec-fetch-site", "Cross-Site")], 403),
        ([("sec-fetch-site", "same-site")], 403),
        ([("sec-fetch-site", "none"), ("sec-fetch-site", "cross-site")], 403),
        ([("sec-fetch-site", "same-origin")], 200),
        ([("sec-fetch-site", "none")], 200),
    ],
)
def test_origins(headers: list[Header], status: int) -> None:
    inner = Inner()
    app = a_gate(inner, origins=["https://PAGE.example:443/", "tauri://localhost"])
    answer = call(app, HOST, *headers)
    assert answer.status == status
    assert len(inner.scopes) == (status == 200)
    if status == 403:
        assert "server.allowed_origins" in answer.error["message"]
        assert "access-control-allow-origin" not in answer.headers


def test_an_allowed_page_may_read_the_answer() -> None:
    headers = call(a_gate(Inner(), origins=[PAGE]), HOST, ("origin", PAGE)).headers
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["vary"] == "Origin"
    assert headers["access-control-expose-headers"] == (
        "x-request-id, x-mlx-server-ignored, retry-after"
    )
    assert "access-control-allow-credentials" not in headers


def test_an_allowed_page_may_read_a_refusal_too() -> None:
    app = a_gate(Inner(), origins=[PAGE])
    answer = call(app, HOST, ("origin", PAGE), ("content-length", "2"), method="POST")
    assert answer.status == 415
    assert answer.headers["access-control-allow-origin"] == PAGE


def test_vary_of_the_app_is_kept() -> None:
    async def varies(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"vary", b"Accept")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    answer = call(a_gate(varies, origins=[PAGE]), HOST, ("origin", PAGE))
    assert answer.headers["vary"] == "Accept, Origin"


@pytest.mark.parametrize("headers", [[], [("origin", "http://localhost:8000")]])
def test_without_another_page_there_is_no_cors(headers: list[Header]) -> None:
    answer = call(a_gate(Inner(), origins=[PAGE]), HOST, *headers)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:8000"])
def test_the_owner_may_allow_every_page(origin: str) -> None:
    answer = call(a_gate(Inner(), origins=["*"]), HOST, ("origin", origin))
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "*"


def test_every_page_includes_images_of_other_sites() -> None:
    app = a_gate(Inner(), origins=["*"])
    assert call(app, HOST, ("sec-fetch-site", "cross-site")).status == 200


PREFLIGHT = [("access-control-request-method", "POST")]


def test_preflight_reflects_header_names_that_are_tokens() -> None:
    inner = Inner()
    wanted = "authorization, Content-Type,x-stainless-os, bad name, evil\x00, ,x-api-key"
    answer = call(
        a_gate(inner, origins=[PAGE]),
        HOST,
        ("origin", PAGE),
        ("access-control-request-headers", wanted),
        *PREFLIGHT,
        method="OPTIONS",
    )
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert answer.headers["access-control-allow-headers"] == (
        "authorization, Content-Type, x-stainless-os, x-api-key"
    )
    assert inner.scopes == []


def test_preflight_of_another_page_is_refused() -> None:
    app = a_gate(Inner(), origins=[PAGE])
    answer = call(app, HOST, ("origin", "http://evil.com"), *PREFLIGHT, method="OPTIONS")
    assert answer.status == 403


def test_options_that_is_no_preflight_reaches_the_app() -> None:
    inner = Inner()
    call(a_gate(inner, origins=[PAGE]), HOST, ("origin", PAGE), method="OPTIONS")
    call(a_gate(inner), HOST, *PREFLIGHT, method="OPTIONS")
    assert len(inner.scopes) == 2


@pytest.mark.parametrize("origin", ["page.example", "null", "https://*.example", "https://a/b", ""])
def test_an_origin_no_browser_would_send_is_a_wrong_setting(origin: str) -> None:
    with pytest.raises(SettingsError, match="allowed_origins"):
        a_gate(Inner(), origins=[origin])
