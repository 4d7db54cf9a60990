"""No web page can use the server, whatever it makes its browser send; and no URL goes round a key.

A page can choose the name by which it calls us, within limits the method, the body and its type. It
can't forge Origin or Sec-Fetch-Site. Here it may do all of that, and has stolen a key besides.
"""

import hashlib
import hmac
import json
import random
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse

from mlx_server.api.ollama import COMMANDS
from mlx_server.app import create_app
from mlx_server.config.settings import ServerSettings, Settings
from mlx_server.http.middleware import FILES_PATH
from tests.api import wire
from tests.live.server import TINY, LiveServer, serving
from tests.tables import cases

KEY, OTHER_KEY = "a-key", "another-key"
COMBINATIONS = 200
SEED = 8

OUR_HOSTS = ("localhost:{}", "LocalHost:{}", "127.0.0.1:{}", "[::1]:{}", "localhost", "127.8.8.8:1")
FOREIGN_HOSTS = (
    *("evil.example", "evil.example:{}", "EVIL.EXAMPLE:{}", "localhost.evil.example:{}"),
    *("127.0.0.1.nip.io:{}", "localtest.me", "lvh.me:{}", "xn--lcalhost-n6a", "l\xf6calhost"),
    *("localhost.:{}", "127.0.0.1.:{}", ".localhost", "localhost..", "*", "localhost*"),
    *("0.0.0.0:{}", "10.0.0.1:{}", "192.168.1.2:{}", "169.254.169.254", "[::]:{}"),
    *("127.1", "0x7f.1", "2130706433", "0177.0.0.1", "127.0.0.1.1", "127.0.0.01"),
    *("[::ffff:127.0.0.1]:{}", "[fe80::1]", "[::1%25lo]", "[::1", "::1", "[127.0.0.1]", "[]"),
    *("a@localhost:{}", "localhost:{}@evil.example", "localhost#.evil.example", "localhost/a"),
    *("localhost, evil.example", "local host", "localhost:", "localhost:x", "localhost:{}:{}"),
    *("localhost:999999", "localhost\\", "localhost%00", "", ":{}", "http://localhost:{}"),
)
OUR_ORIGINS = (None, "http://{host}")
FOREIGN_ORIGINS = (
    *("null", "", "*", "http://evil.example", "https://evil.example:{}", "file://"),
    *("https://{host}", "http://{host}/", "http://{host}.evil.example", "http://evil@{host}"),
    *("http://localhost:3000", "http://127.0.0.2:{}", "ws://{host}", "chrome-extension://abc"),
    *("{host}", "http://{host}, http://evil.example", "http://evil.example/http://{host}"),
)
OUR_SITES = (None, "none", "same-origin")
FOREIGN_SITES = ("cross-site", "same-site", "CROSS-SITE", "cross-site, none", "x")
TYPES = (
    *("application/json", "text/plain", "application/x-www-form-urlencoded"),
    *("multipart/form-data; boundary=x", "text/plain; application/json", "application/jsonp", None),
)
METHODS = ("GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS")
FORWARDED: tuple[dict[str, str], ...] = (
    {},
    {"X-Forwarded-Host": "localhost", "X-Forwarded-For": "127.0.0.1"},
    {"Forwarded": "host=localhost;proto=http", "X-Original-Host": "localhost"},
    {"X-Forwarded-Host": "evil.example"},
)
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
    "Access-Control-Request-Private-Network": "true",
}
UPGRADE = {
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
SOCKET = "/v1/responses"
NAMES = {"{name:path}": TINY, "{id}": "none-such", "{item}": "none-such"}

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]
INPUTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/generate": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
}


def everything() -> list[tuple[str, str]]:
    """(method, path) of every route, with WS where a WebSocket is taken."""
    app = create_app(Settings(server=ServerSettings(adapter_dirs=(Path("/"),))))
    return sorted(
        (method, re.sub(r"\{.*?\}", lambda name: NAMES[name[0]], str(route.path)))
        for route in iter_route_contexts(app.routes)
        for method in route.methods or {"WS"}
    )


ROUTES = everything()


@dataclass(frozen=True)
class Combination:
    path: str
    method: str = "POST"
    host: str = OUR_HOSTS[0]
    origin: str | None = None
    site: str | None = None
    type: str | None = TYPES[0]
    more: dict[str, str] = field(default_factory=dict)

    @property
    def is_pages(self) -> bool:
        foreign_site = self.origin is None and self.site not in OUR_SITES
        return self.host not in OUR_HOSTS or self.origin in FOREIGN_ORIGINS or foreign_site

    def sent(self, port: int) -> bytes:
        host = self.host.replace("{}", str(port))
        headers = {"Host": host, "Authorization": f"Bearer {KEY}", **self.more}
        if self.origin is not None:
            headers["Origin"] = self.origin.replace("{}", str(port)).replace("{host}", host)
        if self.site is not None:
            headers["Sec-Fetch-Site"] = self.site
        if self.method == "WS":
            return request("GET", self.path, {**headers, "Connection": "Upgrade", **UPGRADE})
        body = json.dumps({"model": TINY, **INPUTS.get(self.path, {})}).encode()
        if self.type is not None:
            headers["Content-Type"] = self.type
        return request(self.method, self.path, {**headers, "Connection": "close"}, body)


def request(method: str, target: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    length = {"Content-Length": str(len(body))} if body else {}
    lines = [f"{name}: {value}" for name, value in {**headers, **length}.items()]
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


def one_by_one() -> Iterator[Combination]:
    """What is foreign in one way alone, which that one check has to see."""
    for host in FOREIGN_HOSTS:
        yield Combination(CHAT, host=host)
        yield Combination(SOCKET, "WS", host)
    for origin in FOREIGN_ORIGINS:
        yield Combination(CHAT, origin=origin)
        yield Combination(SOCKET, "WS", origin=origin)
        yield Combination(CHAT, method="OPTIONS", origin=origin, more=PREFLIGHT)
    for site in FOREIGN_SITES:
        yield Combination("/v1/models", "GET", site=site)
    for method, path in ROUTES:
        yield Combination(path, method, "evil.example:{}")


def generated() -> Iterator[Combination]:
    dice = random.Random(SEED)
    for _ in range(COMBINATIONS):
        method, path = dice.choice(ROUTES)
        yield Combination(
            path,
            dice.choice((method, method, *METHODS)) if path != SOCKET else "WS",
            dice.choice((dice.choice(OUR_HOSTS), dice.choice(FOREIGN_HOSTS))),
            dice.choice((dice.choice(OUR_ORIGINS), dice.choice(FOREIGN_ORIGINS))),
            dice.choice((dice.choice(OUR_SITES), dice.choice(FOREIGN_SITES))),
            dice.choice(TYPES),
            dice.choice((*FORWARDED, PREFLIGHT)),
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[LiveServer]:
    models = {TINY: {"source": str(tiny_path), "preload": True}}
    keys = {"api_keys": [KEY, OTHER_KEY], "adapter_dirs": ["."]}
    with serving(tmp_path_factory.mktemp("web"), {"models": models, "server": keys}) as server:
        yield server


def head_of(server: LiveServer, sent: bytes) -> tuple[int, str]:
    """The status, and all of the head in lower case."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as line:
        line.sendall(sent)
        received = b""
        while b"\r\n\r\n" not in received and (piece := line.recv(1 << 16)):
            received += piece
    head = received.partition(b"\r\n\r\n")[0].decode("latin-1").lower()
    return int(head.split()[1]), head


@pytest.mark.parametrize("combinations", [tuple(one_by_one()), tuple(generated())])
def test_pages_are_refused_and_nobody_else(
    server: LiveServer, combinations: Sequence[Combination]
) -> None:
    wrong = [found for each in combinations for found in judged(server, each)]
    assert not wrong
    assert sum(each.is_pages for each in combinations) >= COMBINATIONS / 2


def judged(server: LiveServer, each: Combination) -> Iterator[tuple[Combination, int]]:
    """What is wrong with its answer."""
    status, head = head_of(server, each.sent(server.port))
    if each.is_pages:
        is_right = status in {400, 403}
    elif each.method == "WS":
        is_right = status == 101
    else:
        denied = {401} if each.path in COMMANDS else {401, 403}
        from_browser = each.origin is not None or each.site is not None
        is_json = each.type == TYPES[0] or (each.type in (None, TYPES[2]) and not from_browser)
        takes_forms = each.path == FILES_PATH
        is_right = (status == 415) == (not is_json and not takes_forms) and status not in denied
    if not is_right or "access-control-" in head:
        yield each, status


def test_a_combination_is_served_if_nothing_is_foreign(server: LiveServer) -> None:
    """Else the others would show nothing."""
    for path in INPUTS:
        for host in OUR_HOSTS:
            assert head_of(server, Combination(path, host=host).sent(server.port))[0] == 200


@cases
def test_no_way_of_writing_a_url_goes_round_the_key(server: LiveServer, target: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        headers = {"Host": "localhost", "Connection": "close"}
        status, _ = head_of(server, request(method, target, headers))
        assert status in {307, 400, 401, 404, 405}, (method, target)


def test_a_slash_behind_health_opens_health_alone(server: LiveServer) -> None:
    with server.http() as http:
        health, with_slash = http.get("/health"), http.get("/health/")
        assert (with_slash.status_code, with_slash.json()) == (200, health.json())
        assert http.post("/health/").status_code == http.post("/health").status_code == 405


CARRIERS: Mapping[str, Callable[[str], dict[str, str]]] = {
    "x-api-key": lambda key: {"x-api-key": key},
    "bearer": lambda key: {"authorization": f"Bearer {key}"},
}
"""In which a key may come."""


def http_lets_in(client: TestClient, headers: dict[str, str]) -> bool:
    status = client.get("/v1/models", headers=headers).status_code
    assert status in {200, 401}
    return status == 200


def a_socket_lets_in(client: TestClient, headers: dict[str, str]) -> bool:
    status = 0
    try:
        with (
            suppress(*wire.CANCELLED),
            client.websocket_connect(f"ws://localhost{SOCKET}", headers=headers),
        ):
            status = 101
    except WebSocketDenialResponse as refused:
        status = refused.status_code
    assert status in {101, 401}
    return status == 101


@pytest.mark.parametrize("lets_in", [http_lets_in, a_socket_lets_in])
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("verdict", "key"), [(True, "wrong"), (False, KEY)])
def test_compare_digest_alone_decides(
    tiny_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verdict: bool,
    key: str,
    carrier: str,
    lets_in: Callable[[TestClient, dict[str, str]], bool],
) -> None:
    """It takes the same time for any key, of any length; each is compared, after a match too."""
    compared: list[tuple[Any, Any]] = []

    def compare(given: Any, wanted: Any) -> bool:
        compared.append((given, wanted))
        return verdict

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = (wire.key(KEY), wire.key(OTHER_KEY))
    with wire.client(tiny_path, wire.ScriptedEngine(), api_keys=keys) as client:
        assert lets_in(client, CARRIERS[carrier](key)) is verdict
    given, one, other = (hashlib.sha256(each.encode()).digest() for each in (key, KEY, OTHER_KEY))
    assert compared == [(given, one), (given, other)]
