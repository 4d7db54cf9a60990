"""Servers that are reached by HTTP: what is sent to them, and what they may send."""

import asyncio
import json
import socket
import ssl
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mlx_server import __version__, limits
from mlx_server.errors import BadRequest
from mlx_server.limits import MCP_MESSAGE_BRACKETS
from mlx_server.mcp import Connector, Connectors, McpError, Toolset, addresses
from mlx_server.mcp.limits import Meter
from mlx_server.mcp.server import ToolResult
from mlx_server.requests import McpServer
from tests.hostile.outbound import sitecustomize as outbound
from tests.mcp.official import make
from tests.mcp.playing import lowered, served
from tests.mcp.wild import (
    HASTY,
    JSON,
    SMALL,
    TEXT,
    Send,
    Wild,
    answered,
    listed,
    opened,
    outcome,
    quiet,
    said,
    seen,
)

pytestmark = pytest.mark.anyio


async def hangs(send: Send, id: Any) -> None:
    await asyncio.sleep(60)


async def large(send: Send, id: Any) -> None:
    await said(send, {**seen(id), "more": "x" * (1 << 17)})


async def lists(send: Send, id: Any) -> None:
    await said(send, {**seen(id), "more": [[]] * (MCP_MESSAGE_BRACKETS + 1)})


async def endless_events(send: Send, id: Any) -> None:
    head = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    for _ in range(400):
        piece = b": " + b"x" * 1022 + b"\n\n"
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def pings(send: Send, id: Any) -> None:
    head = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    for number in range(200):
        ping = json.dumps({"jsonrpc": "2.0", "id": f"p{number}", "method": "ping"}).encode()
        piece = b"data: " + ping + b"\n\n"
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


async def cuts_an_emoji(send: Send, id: Any) -> None:
    await said(send, {"id": id, "result": {"content": [{"type": "text", "text": "x\ud83d"}]}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("habit", "limits", "message"),
    [
        (quiet, {}, "seen"),
        (cuts_an_emoji, {}, "x\ufffd"),
        (hangs, HASTY, "error: The server did not answer within 0.5 s."),
        (large, SMALL, "error: The server sent more than 65536 bytes."),
        (lists, {}, "error: The server sent a message of more than 262144 values."),
        (endless_events, SMALL, "error: The server closed the connection."),
        (pings, {"MCP_MESSAGES": 100}, "error: The server closed the connection."),
        (compressed, {}, "error: The server sent compressed data, which was not requested."),
        (lies_about_ids, HASTY, "error: The server did not answer within 0.5 s."),
        (breaks, {}, "error: The server answered 500 Internal Server Error."),
        (is_a_page, {}, "error: Unexpected content type: text/html"),
    ],
)
async def test_a_call_fails_alone(habit: Any, limits: dict[str, float], message: str) -> None:
    async with served(Wild(habit)) as url, opened(McpServer("wild", url=url), limits) as toolset:
        assert listed(toolset) == (["look"], "")
        assert (await outcome(toolset)).startswith(message)


ELSEWHERE = {
    "another port": "http://127.0.0.1:{secret}/x",
    "another name": "http://localhost:{secret}/x",
    "a user's name": "http://a:b@127.0.0.1:{secret}/x",
    "no scheme": "//127.0.0.1:{secret}/x",
    "another scheme": "https://127.0.0.1:{own}/x",
    "a file": "file:///etc/passwd",
    "no URL": "http://[::1",
    "the metadata of clouds": "http://169.254.169.254/latest",
}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "status"), [*zip(ELSEWHERE, cycle([302, 308]))])
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
            assert listed(toolset) == (["look"], "")
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
    assert sum(read) < 2 * SMALL["MCP_SESSION_BYTES"]


async def test_it_connects_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert len(listed(toolset)[0]) == 5
        assert (await toolset.call("s", "add", '{"a": 1, "b": 2}')).text == "3"


async def test_it_is_told_who_we_are() -> None:
    wild = Wild(quiet)
    async with served(wild) as url, opened(McpServer("wild", url=url)):
        pass
    asked = (body for body in wild.bodies if body.get("method") == "initialize")
    reported = [body["params"]["clientInfo"] for body in asked]
    assert reported == [{"name": "mlx-server", "version": __version__}]


# DNS rebinding, with lookups whose answers change: nothing private is ever connected to.


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
    assert (tools, names.lookups) == ([], 1)
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
            assert listed(toolset) == (["look"], "")
            if not redirects:
                assert await outcome(toolset) == "seen"
                names.addresses = ["127.0.0.1"]
            assert "private network" in await outcome(toolset)
    assert good.heads
    assert "/elsewhere" not in good.paths
    assert secret.heads == []


@pytest.mark.slow
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

    async with served(Wild(refuses)) as url, opened(McpServer("wild", url=url), SMALL) as toolset:
        with pytest.raises(McpError) as caught:
            await toolset.call("wild", "look", "{}")
    said = str(caught.value)
    assert said.removeprefix("The server answered ").startswith(message)
    assert len(said) < 2 * limits.QUOTED_ERROR_CHARACTERS
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
    assert not tools
    assert error == "The server answered 401 Unauthorized: The token is too old."
    assert "an MCP server has no tools (HTTP 401)" in caplog.text
    assert "too old" not in caplog.text


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
            assert not tools
            assert "private network" in error, host
        assert wild.heads == []
        async with opened(McpServer("wild", url=url)) as toolset:
            assert await outcome(toolset) == "seen"


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
        (replace(GOOD, url=None, connector="nobody"), "models.yaml has: tool"),
        (replace(GOOD, url=None, connector="tool", authorization="x"), "takes no headers"),
        *(
            (replace(GOOD, headers={name: "x"}), "can't have the header")
            for name in ("Host", "content-length", "Transfer-Encoding", "a b", "", "mcp-session-id")
        ),
        (replace(GOOD, headers={"x": "a\r\nb: c"}), "not printable"),
        (replace(GOOD, headers={"x": "é"}), "not printable"),
        (replace(GOOD, authorization="a\nb"), "not printable"),
    ],
)
async def test_what_can_not_be_a_server(server: McpServer, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as error:
        async with opened(server, tool=Connector(command=("true",))):
            raise AssertionError
    assert error.value.param == "tools[0]"


async def test_servers_are_few() -> None:
    servers = [replace(GOOD, label=str(i)) for i in range(17)]
    with pytest.raises(BadRequest, match="the limit is 16"):
        async with Connectors().open(servers):
            raise AssertionError


class Server:
    """Has the tool `look`, which answers when it may."""

    def __init__(self) -> None:
        self.requested = SimpleNamespace(label="s")
        self.listing = SimpleNamespace(tools={"look": None})
        self.may = asyncio.Event()
        self.called = 0

    async def call(self, tool: str, arguments: str) -> ToolResult:
        self.called += 1
        await self.may.wait()
        return ToolResult("x" * 40)


def toolset(server: Server, **limits: float) -> Toolset:
    with lowered(**limits):
        return Toolset([cast(Any, server)])


async def test_only_tools_of_the_list_are_called() -> None:
    server = Server()
    found = toolset(server)
    for label, tool in (("s", "write"), ("other", "look")):
        assert not found.has(label, tool)
        with pytest.raises(McpError, match="no such tool"):
            await found.call(label, tool, "{}")
    assert server.called == 0


async def test_a_few_calls_run_at_a_time() -> None:
    server = Server()
    found = toolset(server, MCP_PARALLEL_CALLS=2)
    calls = [asyncio.create_task(found.call("s", "look", "{}")) for _ in range(5)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert server.called == 2
    server.may.set()
    await asyncio.gather(*calls)
    assert server.called == 5
