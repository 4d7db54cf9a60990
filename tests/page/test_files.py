"""The files of the page over HTTP, and what is packed with them."""

import gzip
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api.page.routes import page_files
from mlx_server.config.settings import ServerSettings, StoreSettings
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine, error, ok
from tests.tables import cases

STATIC = Path(__file__).parents[2] / "mlx_server" / "api" / "page" / "static"
MOST = 400_000
"""Of all files, the libraries as they are stored and sent."""
LICENSES = (STATIC / "vendor" / "LICENSES").read_text("utf-8")
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "sec-fetch-site": "none"}
PATHS = ["/", *(file.path for file in page_files() if file.path != "/page/index.html")]


@pytest.fixture(scope="module")
def locked(tiny_path: Path) -> Iterator[TestClient]:
    with wire.client(tiny_path, ScriptedEngine(), api_keys=(wire.key("sesame"),)) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_a_file_needs_no_key_and_runs_nothing_of_others(locked: TestClient, path: str) -> None:
    found = locked.get(path, headers=BROWSER)
    assert found.status_code == 200
    policy = dict(
        part.split(" ", 1) for part in found.headers["content-security-policy"].split("; ")
    )
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
    }
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["referrer-policy"] == "no-referrer"
    assert found.headers["cache-control"] == "no-cache"
    kind = {"": "html", ".css": "css", ".js": "javascript"}[Path(path).suffix]
    assert found.headers["content-type"] == f"text/{kind}; charset=utf-8"


@pytest.mark.parametrize("path", PATHS)
def test_an_unchanged_file_is_not_sent_again(locked: TestClient, path: str) -> None:
    etag = locked.get(path, headers=BROWSER).headers["etag"]
    again = locked.get(path, headers={**BROWSER, "if-none-match": f'"other", W/{etag}'})
    assert (again.status_code, again.content) == (304, b"")
    assert locked.get(path, headers={**BROWSER, "if-none-match": '"other"'}).status_code == 200


def test_who_is_no_browser_learns_as_before_that_a_server_is_there(tiny_path: Path) -> None:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        assert client.get("/").text == "mlx-server is running"
        assert client.get("/", headers=BROWSER).headers["vary"] == "Accept, Accept-Encoding"


def test_without_a_key_there_is_no_data(locked: TestClient) -> None:
    for path in ("/page/events", "/page/history", "/v1/pool"):
        assert error(locked.get(path, headers=BROWSER), status=401)["code"] == "invalid_api_key"
    error(locked.get("/"), status=401)


def test_the_page_can_be_turned_off(tiny_path: Path) -> None:
    with wire.client(tiny_path, ScriptedEngine(), page=False) as client:
        assert client.get("/", headers=BROWSER).text == "mlx-server is running"
        for path in (*PATHS[1:], "/page/events", "/page/history", "/page"):
            assert error(client.get(path, headers=BROWSER), status=404)["code"] == "not_found"


@cases
def test_no_other_path_is_a_file(locked: TestClient, path: str) -> None:
    found = locked.get(path, headers={**BROWSER, "authorization": "Bearer sesame"})
    assert error(found, status=404)["code"] == "not_found"


def test_a_library_is_unpacked_for_who_knows_no_gzip(locked: TestClient) -> None:
    (path,) = (path for path in PATHS if "purify" in path)
    plain = locked.get(path, headers={**BROWSER, "accept-encoding": "identity"})
    packed = locked.get(path, headers={**BROWSER, "accept-encoding": "br, gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content


def test_the_files_are_small_and_whole() -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST
    vendor = STATIC / "vendor"
    lines = (vendor / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    packed = {path.name for path in vendor.iterdir()} - {"SHA256SUMS", "LICENSES"}
    assert packed == {f"{name}.gz" for name in listed}
    for name, digest in listed.items():
        content = gzip.decompress((vendor / f"{name}.gz").read_bytes())
        assert hashlib.sha256(content).hexdigest() == digest
        assert re.search(rf"^{re.escape(name)} .*(?:MIT|Apache|BSD)", LICENSES, re.MULTILINE)


def test_no_file_has_inline_code_or_names_another_server() -> None:
    for file in page_files():
        text = file.content.decode()
        if "/vendor/" in file.path:
            continue
        assert not re.search(r"(?:src|href|from|import|url\()\s*=?\s*[\"'(]?(?:https?:)?//", text)
        assert "innerHTML" not in text
        if file.media_type == "text/html":
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


PATH = "/page/conversations"
KEYS = ("one-key", "another-key")


@pytest.fixture(scope="module")
def client(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    store = StoreSettings(data_dir=tmp_path_factory.mktemp("data"), bytes=400_000)
    settings: Json = {"api_keys": tuple(map(wire.key, KEYS)), "page": ("texts", "conversations")}
    with wire.client(tiny_path, ScriptedEngine(), store, **settings) as client:
        yield client


def by(key: str) -> Any:
    return {"headers": {"authorization": f"Bearer {key}"}}


def body(title: str, text: str = "{}") -> Json:
    return {"title": title, "changed": 5.0, "text": text}


def titles(client: TestClient, key: str = KEYS[0]) -> list[str]:
    listed = ok(client.get(PATH, **by(key)))
    assert listed["stored"] is True
    return [each["title"] for each in listed["data"]]


def test_each_key_has_conversations_of_its_own(client: TestClient) -> None:
    one, other = map(by, KEYS)
    for id in "ab":
        ok(client.post(f"{PATH}/{id}", json=body(f"first {id}"), **one))
    assert ok(client.post(f"{PATH}/a", json=body("é 🙂", '["ü"]'), **one)) == {
        "id": "a",
        "title": "é 🙂",
        "changed": 5.0,
        "bytes": 6,
    }
    assert titles(client) == ["é 🙂", "first b"]  # the last used first
    assert ok(client.get(f"{PATH}/a", **one))["text"] == '["ü"]'
    assert titles(client, KEYS[1]) == []
    for method in ("GET", "DELETE"):
        error(client.request(method, f"{PATH}/a", **other), status=404)
    ok(client.post(f"{PATH}/a", json=body("theirs"), **other))
    error(client.get("/v1/conversations/a", **one), status=404)  # the API has others
    assert ok(client.delete(f"{PATH}/a", **one))["deleted"] is True
    assert titles(client) == ["first b"]
    assert titles(client, KEYS[1]) == ["theirs"]
    error(client.get(PATH), status=401)


def test_what_is_too_large_is_refused_and_what_was_there_stays(client: TestClient) -> None:
    one = by(KEYS[0])
    ok(client.post(f"{PATH}/c", json=body("whole"), **one))
    full = client.post(f"{PATH}/c", json=body("half", "x" * 250_000), **one)
    assert error(full, status=507)["code"] == "store_full"
    error(client.post(f"{PATH}/{'c' * 41}", json=body("long"), **one), status=400)
    assert ok(client.get(f"{PATH}/c", **one))["title"] == "whole"


def test_a_half_of_a_pair_is_stored_as_something_else(client: TestClient) -> None:
    raw = b'{"title": "a\\ud83d", "changed": 1, "text": "\\udc00"}'
    headers = {"content-type": "application/json", **by(KEYS[0])["headers"]}
    ok(client.post(f"{PATH}/d", content=raw, headers=headers))
    assert titles(client)[0] == "a\ufffd"


def test_the_list_has_no_more_of_a_title_than_the_page_shows(client: TestClient) -> None:
    """It is of all conversations: with whole titles it would be as large as the store."""
    one, most = by(KEYS[0]), limits.LISTED_TITLE
    for extra in (0, 1, 50_000):
        ok(client.post(f"{PATH}/e", json=body("é" * most + "x" * extra), **one))
        assert titles(client)[0] == "é" * most


def test_without_the_owners_word_nothing_is_stored(tiny_path: Path) -> None:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        assert ok(client.get(PATH)) == {"object": "page.conversations", "stored": False, "data": []}
        refused = [
            client.post(f"{PATH}/a", json=body("a")),
            client.get(f"{PATH}/a"),
            client.delete(f"{PATH}/a"),
        ]
        for response in refused:
            assert "`page: conversations`" in error(response, status=403)["message"]


def test_the_setting_names_what_the_page_has() -> None:
    both = ServerSettings(page=("texts", "conversations"))
    assert both.page_has("texts")
    assert both.page_has("conversations")
    assert not ServerSettings(page="texts").page_has("conversations")
    assert not ServerSettings().page_has("texts")
