"""Servers that are reached by HTTP: what is sent to them, and what they may send."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mlx_server import __version__
from mlx_server.errors import BadRequest
from mlx_server.mcp import Connector, Connectors, McpError, McpLimits, Toolset
from mlx_server.mcp.streams import Meter
from mlx_server.requests import McpServer
from tests.hostile.outbound import sitecustomize as outbound
from tests.mcp.official import make
from tests.mcp.playing import all_gone, served

pytestmark = pytest.mark.anyio

LIMITS = McpLimits(open_seconds=10, call_seconds=10)
HASTY = McpLimits(open_seconds=10, call_seconds=0.5)
SMALL = McpLimits(message_bytes=1 << 16, session_bytes=1 << 18)
TOOL = {"name": "look", "inputSchema": {"type": "object"}}

Send = Callable[[dict[str, Any]], Awaitable[None]]
Head = list[tuple[bytes, bytes]]


class Wild:
    """A server without the SDK: it is well-behaved until a tool is called."""

    def __init__(self, call: Callable[[Send, Any], Awaitable[None]]) -> None:
        self.heads: list[dict[str, str]] = []
        self.paths: list[str] = []
        self._call = call

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.heads.append({k.decode(): v.decode() for k, v in scope["headers"]})
        self.paths.append(scope["path"])
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        asked = json.loads(body or "{}")
        match asked.get("method"):
            case "initialize":
                result: Any = {
                    "protocolVersion": asked["params"]["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "wild", "version": "1"},
                }
                await said(send, {"id": asked["id"], "result": result})
            case "tools/list":
                await said(send, {"id": asked["id"], "result": {"tools": [TOOL]}})
            case "tools/call":
                await self._call(send, asked["id"])
            case "notifications/initialized":
                await answered(send, 202, b"")
            case _:
                await answered(send, 404, b"")


async def answered(send: Send, status: int, body: bytes, *head: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(head)})
    await send({"type": "http.response.body", "body": body})


async def said(send: Send, message: dict[str, Any]) -> None:
    body = json.dumps({"jsonrpc": "2.0", **message}).encode()
    await answered(send, 200, body, (b"content-type", b"application/json"))


def seen(id: Any) -> dict[str, Any]:
    return {"id": id, "result": {"content": [{"type": "text", "text": "seen"}]}}


@asynccontextmanager
async def opened(
    server: McpServer,
    limits: McpLimits = LIMITS,
    *,
    allow_private_urls: bool = True,
    **connectors: Any,
) -> AsyncIterator[Toolset]:
    found = Connectors(connectors, limits=limits, allow_private_urls=allow_private_urls)
    async with found.open([server]) as toolset:
        yield toolset
    await all_gone()


def listed(toolset: Toolset) -> tuple[int, str]:
    (server,) = toolset.servers
    return len(server.listing.tools), server.listing.error or ""


async def outcome(toolset: Toolset) -> str:
    try:
        return await toolset.call("wild", "look", "{}")
    except McpError as error:
        return f"error: {error}"


async def quiet(send: Send, id: Any) -> None:
    await said(send, seen(id))


async def hangs(send: Send, id: Any) -> None:
    await asyncio.sleep(60)


async def large(send: Send, id: Any) -> None:
    await said(send, {**seen(id), "more": "x" * (1 << 17)})


async def endless_events(send: Send, id: Any) -> None:
    head = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    for _ in range(400):
        piece = b": " + b"x" * 1022 + b"\n\n"
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def compressed(send: Send, id: Any) -> None:
    head = [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")]
    await answered(send, 200, b"\x1f\x8b", *head)


async def lies_about_ids(send: Send, id: Any) -> None:
    await said(send, seen(10**6))


async def breaks(send: Send, id: Any) -> None:
    await answered(send, 500, b"<h1>Oh no</h1>", (b"content-type", b"text/html"))


async def is_a_page(send: Send, id: Any) -> None:
    await answered(send, 200, b"<h1>Hello</h1>", (b"content-type", b"text/html"))


@pytest.mark.parametrize(
    ("habit", "limits", "message"),
    [
        (quiet, LIMITS, "seen"),
        (hangs, HASTY, "error: The server did not answer within 0.5 s."),
        (large, SMALL, "error: The server sent more than 65536 bytes."),
        (endless_events, SMALL, "error: The server closed the connection."),
        (compressed, LIMITS, "error: The server sent compressed data, which was not requested."),
        (lies_about_ids, HASTY, "error: The server did not answer within 0.5 s."),
        (breaks, LIMITS, "error: The server answered 500 Internal Server Error."),
        (is_a_page, LIMITS, "error: Unexpected content type: text/html"),
    ],
)
async def test_a_call_fails_alone(habit: Any, limits: McpLimits, message: str) -> None:
    async with served(Wild(habit)) as url, opened(McpServer("wild", url=url), limits) as toolset:
        assert listed(toolset) == (1, "")
        assert (await outcome(toolset)).startswith(message)


JSON, TEXT = (b"content-type", b"application/json"), (b"content-type", b"text/plain")


@pytest.mark.parametrize(
    ("status", "body", "head", "message"),
    [
        (401, b'{"error": "invalid_token"}', JSON, "401 Unauthorized: invalid_token"),
        (403, b'{"detail": "Not yours."}', JSON, "403 Forbidden: Not yours."),
        (404, b"", TEXT, "404 Not Found."),
        (
            429,
            b'{"error": {"message": "Slow\\n down."}}',
            JSON,
            "429 Too Many Requests: Slow down.",
        ),
        (503, b"Down for repair.", TEXT, "503 Service Unavailable: Down for repair."),
        (500, b"x" * 50_000, TEXT, "500 Internal Server Error: xxx"),
        (500, b"x" * (1 << 17), TEXT, "500 Internal Server Error."),
        (500, b"[" * 50_000, JSON, "500 Internal Server Error."),
        (599, b"\xff\xfe", TEXT, "599: \ufffd\ufffd"),
        (
            400,
            b'{"jsonrpc": "2.0", "id": null, "error": {"code": -32602, "message": "No such day."}}',
            JSON,
            "No such day.",
        ),
    ],
)
async def test_a_refusal_keeps_its_cause(
    status: int,
    body: bytes,
    head: tuple[bytes, bytes],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuses(send: Send, id: Any) -> None:
        await answered(send, status, body, head)

    async with (
        served(Wild(refuses)) as url,
        opened(McpServer("wild", url=url), SMALL) as toolset,
    ):
        with pytest.raises(McpError) as caught:
            await toolset.call("wild", "look", "{}")
    said = str(caught.value)
    assert said.removeprefix("The server answered ").startswith(message)
    assert len(said) < 2 * SMALL.error_characters
    is_http = not message.startswith("No such")
    assert caught.value.kind == (f"HTTP {status}" if is_http else "McpError")


async def test_a_server_that_refuses_at_once_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def refuses(scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan":
            await Wild(quiet)(scope, receive, send)
            return
        await answered(send, 401, b'{"error_description": "The token is too old."}', JSON)

    async with served(refuses) as url, opened(McpServer("wild", url=url)) as toolset:
        tools, error = listed(toolset)
    assert tools == 0
    assert error == "The server answered 401 Unauthorized: The token is too old."
    assert "an MCP server has no tools (HTTP 401)" in caplog.text
    assert "too old" not in caplog.text


async def test_it_is_told_who_we_are() -> None:
    seen: list[Any] = []

    class Noting(Wild):
        async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
            async def noted() -> Any:
                message = await receive()
                if message["type"] == "http.request" and message["body"]:
                    seen.append(json.loads(message["body"]))
                return message

            await super().__call__(scope, noted, send)

    async with served(Noting(quiet)) as url, opened(McpServer("wild", url=url)):
        pass
    reported = [m["params"]["clientInfo"] for m in seen if m["method"] == "initialize"]
    assert reported == [{"name": "mlx-server", "version": __version__}]


async def test_redirects_stay_where_they_were_sent_from() -> None:
    secret = Wild(quiet)

    async with served(secret) as inside:

        async def redirects(send: Send, id: Any) -> None:
            await answered(send, 307, b"", (b"location", inside.encode()))

        async with (
            served(Wild(redirects)) as url,
            opened(McpServer("wild", url=url, authorization="mine")) as toolset,
        ):
            said = await outcome(toolset)
    assert "not followed" in said
    assert secret.heads == []


ELSEWHERE = {
    "another port": "http://127.0.0.1:{secret}/x",
    "another name": "http://localhost:{secret}/x",
    "a user's name": "http://a:b@127.0.0.1:{secret}/x",
    "no scheme": "//127.0.0.1:{secret}/x",
    "another scheme": "https://127.0.0.1:{own}/x",
    "a file": "file:///etc/passwd",
    "FTP": "ftp://127.0.0.1:{own}/x",
    "a script": "javascript:0",
    "nothing": "",
    "no URL": "http://[::1",
    "a long one": "http://127.0.0.1:{own}/" + "x" * 60_000,
    "the metadata of clouds": "http://169.254.169.254/latest",
}


@pytest.mark.parametrize("status", [302, 308])
@pytest.mark.parametrize("target", ELSEWHERE)
async def test_no_redirect_leads_anywhere_else(status: int, target: str) -> None:
    """The call fails alone, and no header of the request is seen by another server."""
    secret = Wild(quiet)
    async with served(secret) as inside:

        async def redirects(send: Send, id: Any) -> None:
            ports = {"own": url.rpartition(":")[2], "secret": inside.rpartition(":")[2]}
            location = ELSEWHERE[target].format(**ports).encode()
            await answered(send, status, b"", (b"location", location))

        wild = Wild(redirects)
        async with (
            served(wild) as url,
            opened(McpServer("wild", url=url, authorization="mine")) as toolset,
        ):
            assert listed(toolset) == (1, "")
            assert (await outcome(toolset)).startswith("error: ")
    assert secret.heads == []
    assert outbound.attempts() == []


@pytest.mark.parametrize("status", [303, 307])
async def test_redirects_in_a_circle_end(status: int) -> None:
    async def again(send: Send, id: Any) -> None:
        await answered(send, status, b"", (b"location", b"/"))

    # of those that change the method to GET, the body is gone: no loop then
    wild = Wild(again)
    async with served(wild) as url, opened(McpServer("wild", url=url)) as toolset:
        assert (await outcome(toolset)).startswith("error: ")
    assert len(wild.heads) < 50


async def test_a_redirect_with_a_body_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of it is read than of any answer."""
    read: list[int] = []
    count = Meter.count

    def noted(meter: Meter, size: int) -> None:
        read.append(size)
        count(meter, size)

    monkeypatch.setattr(Meter, "count", noted)

    async def endless(send: Send, id: Any) -> None:
        head = [(b"location", b"/elsewhere")]
        await send({"type": "http.response.start", "status": 307, "headers": head})
        for _ in range(4096):
            await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})

    wild = Wild(endless)
    async with served(wild) as url, opened(McpServer("wild", url=url), SMALL) as toolset:
        assert (await outcome(toolset)).startswith("error: ")
    assert sum(read) < 2 * SMALL.session_bytes


async def test_a_redirect_on_the_same_server_is_checked_as_well() -> None:
    async def elsewhere(send: Send, id: Any) -> None:
        await answered(send, 307, b"", (b"location", b"//127.0.0.1:1/x"))

    async with served(Wild(elsewhere)) as url, opened(McpServer("wild", url=url)) as toolset:
        assert "not followed" in await outcome(toolset)


async def test_headers_and_authorization_are_sent() -> None:
    wild = Wild(quiet)
    async with served(wild) as url:
        server = McpServer("wild", url=url, headers={"X-Team": "a"}, authorization="token")
        async with opened(server) as toolset:
            assert await outcome(toolset) == "seen"
    assert {head["authorization"] for head in wild.heads} == {"Bearer token"}
    assert {head["x-team"] for head in wild.heads} == {"a"}
    assert {head["accept-encoding"] for head in wild.heads} == {"identity"}
    assert {head["host"] for head in wild.heads} == {url.removeprefix("http://")}


async def test_the_owners_headers_win_over_those_of_a_request() -> None:
    wild = Wild(quiet)
    async with served(wild) as url:
        connector = Connector(url=url, headers={"Authorization": "owner"}, allow_private=True)
        server = McpServer("wild", connector="wiki", authorization="mine", headers={"X-A": "1"})
        async with opened(server, allow_private_urls=False, wiki=connector) as toolset:
            assert await outcome(toolset) == "seen"
    assert {head["authorization"] for head in wild.heads} == {"owner"}
    assert {head["x-a"] for head in wild.heads} == {"1"}


async def test_private_addresses_are_for_those_whom_the_owner_lets() -> None:
    wild = Wild(quiet)
    async with served(wild) as url:
        port = url.rpartition(":")[2]
        hosts = ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "127.1"]
        for host in hosts:
            server = McpServer("wild", url=f"http://{host}:{port}")
            async with opened(server, allow_private_urls=False) as toolset:
                tools, error = listed(toolset)
            assert tools == 0
            assert "private network" in error, host
        assert wild.heads == []
        async with opened(McpServer("wild", url=url)) as toolset:
            assert await outcome(toolset) == "seen"


async def test_it_connects_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def checked(host: str, port: int, *, allow_private: bool) -> list[str]:
        assert (host, allow_private) == ("rebound.invalid", False)
        return ["127.0.0.2", "127.0.0.1"]  # the first one does not answer

    monkeypatch.setattr("mlx_server.mcp.http.resolved", checked)
    wild = Wild(quiet)
    async with served(wild) as url:
        port = url.rpartition(":")[2]
        server = McpServer("wild", url=f"http://rebound.invalid:{port}")
        async with opened(server, allow_private_urls=False) as toolset:
            assert await outcome(toolset) == "seen"
    assert {head["host"] for head in wild.heads} == {f"rebound.invalid:{port}"}


async def test_certificates_are_those_of_the_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def checked(host: str, port: int, *, allow_private: bool) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr("mlx_server.mcp.http.resolved", checked)
    names: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_certificate(tmp_path, "rebound.invalid"))
    context.sni_callback = lambda _, name, __: names.append(name)
    listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        async with opened(McpServer("wild", url=f"https://rebound.invalid:{port}")) as toolset:
            assert "CERTIFICATE_VERIFY_FAILED" in listed(toolset)[1], "nobody has signed it"
    assert set(names) == {"rebound.invalid"}


def _certificate(folder: Path, name: str) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = folder / "certificate.pem"
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + made.public_bytes(pem))
    return file


async def test_a_server_of_the_sdk_is_left_without_a_session() -> None:
    app = make().streamable_http_app()
    async with served(app) as url, opened(McpServer("s", url=f"{url}/mcp")) as toolset:
        assert listed(toolset) == (5, "")
        assert await toolset.call("s", "add", '{"a": 1, "b": 2}') == "3"


GOOD = McpServer("s", url="https://example.com/mcp", param="tools[0]")


@pytest.mark.parametrize(
    ("server", "message"),
    [
        *(
            (replace(GOOD, url=url), "needs an http or https URL")
            for url in (
                *("ftp://x/", "file:///etc/passwd", "x", "", "http://", "http:///x", "//x/y"),
                *("http://[::1", "http://x:99999/", "http://x y/", "http://x/\n", "javascript:0"),
                "http://" + "x" * 3000,
            )
        ),
        (replace(GOOD, url="http://a:b@x/"), "user name"),
        (replace(GOOD, url=None), "a URL or a connector"),
        (replace(GOOD, connector="wiki"), "a URL or a connector"),
        (replace(GOOD, url=None, connector="nobody"), "models.yaml has: tool"),
        (replace(GOOD, url=None, connector="tool", authorization="x"), "takes no headers"),
        *(
            (replace(GOOD, headers={name: "x"}), "can't have the header")
            for name in ("Host", "content-length", "Transfer-Encoding", "a b", "", "mcp-session-id")
        ),
        (replace(GOOD, headers={"x": "a\r\nb: c"}), "not printable"),
        (replace(GOOD, headers={"x": "é"}), "not printable"),
        (replace(GOOD, authorization="a\nb"), "not printable"),
        (replace(GOOD, headers={f"x{i}": "" for i in range(65)}), "more than 64 headers"),
    ],
)
async def test_what_can_not_be_a_server(server: McpServer, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as error:
        async with opened(server, tool=Connector(command=("true",))):
            raise AssertionError
    assert error.value.param == "tools[0]"


async def test_servers_are_few_and_have_names_of_their_own() -> None:
    found = Connectors(limits=LIMITS)
    for servers, message in (
        ([GOOD, GOOD], "Two MCP servers have the label 's'"),
        ([replace(GOOD, label=str(i)) for i in range(17)], "the limit is 16"),
    ):
        with pytest.raises(BadRequest, match=message):
            async with found.open(servers):
                raise AssertionError
