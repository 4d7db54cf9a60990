"""The page's conversations on the server, over HTTP: for the key that has stored them, where the
owner wants them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.config.settings import ServerSettings, StoreSettings
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine, error, ok

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
