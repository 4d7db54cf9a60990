"""Chat completions with `store: true`, over the wire."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from starlette.testclient import TestClient

from mlx_server.config.settings import StoreSettings
from tests.api import wire
from tests.api.strict import assert_strict
from tests.api.wire import TEXT, Json, ScriptedEngine, error, events, key, ok
from tests.tables import cases

PATH = "/v1/chat/completions"
HI: Json = {"role": "user", "content": "hi"}
PARTS: Json = {"role": "user", "content": [{"type": "text", "text": "and?"}], "name": "me"}
ASSISTANT: Json = {"role": "assistant", "content": "x"}


@pytest.fixture
def client(tiny_path: Path, tmp_path: Path, engine: ScriptedEngine) -> Iterator[TestClient]:
    store = StoreSettings(data_dir=tmp_path)
    with wire.client(tiny_path, engine, store, api_keys=(key("one"), key("two"))) as client:
        client.headers["authorization"] = "Bearer one"
        yield client


def post(client: TestClient, **asked: Any) -> Any:
    body = {"model": wire.MODEL, "messages": [HI, ASSISTANT, PARTS], "store": True, **asked}
    return client.post(PATH, json=body)


def listed(client: TestClient, **query: Any) -> list[str]:
    return [each["id"] for each in ok(client.get(PATH, params=query))["data"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_stored(client: TestClient, stream: bool) -> None:
    response = post(client, stream=stream, temperature=0.5, metadata={"a": "b"})
    made = events(response)[0] if stream else ok(response)
    stored = ok(client.get(f"{PATH}/{made['id']}"))
    if not stream:
        assert {name: stored[name] for name in made} == made
    assert stored["choices"][0]["message"]["content"] == TEXT
    assert stored["usage"]["completion_tokens"] > 0
    assert (stored["metadata"], stored["temperature"]) == ({"a": "b"}, 0.5)
    bare = {n: v for n, v in stored.items() if n not in ("metadata", "temperature")}
    assert_strict(ChatCompletion, bare)


def test_nothing_is_stored_unasked(client: TestClient) -> None:
    for asked in (False, None):
        assert ok(post(client, store=asked, metadata={"a": 1}))
    assert listed(client) == []


def test_its_messages(client: TestClient) -> None:
    path = f"{PATH}/{ok(post(client))['id']}/messages"
    page = ok(client.get(path))
    assert [(m["role"], m["content"], m["content_parts"]) for m in page["data"]] == [
        ("user", "hi", None),
        ("assistant", "x", None),
        ("user", None, PARTS["content"]),
    ]
    assert page["data"][2]["name"] == "me"
    first = ok(client.get(path, params={"limit": 1}))
    assert (first["has_more"], first["last_id"]) == (True, page["first_id"])
    rest = ok(client.get(path, params={"after": first["last_id"]}))
    assert rest["data"] == page["data"][1:]
    assert ok(client.get(path, params={"order": "desc"}))["data"] == page["data"][::-1]


def test_lists_are_filtered(client: TestClient) -> None:
    odd = {"a'\"]": "\\ü🙂"}
    ids = [
        ok(post(client, metadata=metadata))["id"]
        for metadata in ({"a": "b"}, {"a": "b", "c": "d"}, odd, None)
    ]
    assert listed(client) == ids
    assert listed(client, order="desc", limit=2) == ids[:1:-1]
    assert listed(client, after=ids[1]) == ids[2:]
    assert listed(client, model=wire.MODEL) == ids
    assert listed(client, model="other") == []
    assert listed(client, **{"metadata[a]": "b"}) == ids[:2]
    assert listed(client, **{"metadata[a]": "b", "metadata[c]": "d"}) == ids[1:2]
    assert listed(client, **{"metadata[a'\"]]": "\\ü🙂"}) == ids[2:3]
    page = ok(client.get(PATH, params={"limit": 3}))
    assert (page["object"], page["has_more"]) == ("list", True)
    assert (page["first_id"], page["last_id"]) == (ids[0], ids[2])


def test_its_metadata_are_replaced(client: TestClient) -> None:
    made = ok(post(client, metadata={"a": "b"}))
    updated = ok(client.post(f"{PATH}/{made['id']}", json={"metadata": {"c": "d"}}))
    assert updated == ok(client.get(f"{PATH}/{made['id']}"))
    assert {**made, "metadata": {"c": "d"}} == updated
    assert listed(client, **{"metadata[a]": "b"}) == []
    assert listed(client, **{"metadata[c]": "d"}) == [made["id"]]


def test_it_is_deleted(client: TestClient) -> None:
    id = ok(post(client))["id"]
    gone = {"object": "chat.completion.deleted", "id": id, "deleted": True}
    assert ok(client.delete(f"{PATH}/{id}")) == gone
    for response in (
        client.get(f"{PATH}/{id}"),
        client.get(f"{PATH}/{id}/messages"),
        client.post(f"{PATH}/{id}", json={}),
        client.delete(f"{PATH}/{id}"),
    ):
        assert id in error(response, 404)["message"]


def test_no_key_sees_anothers(client: TestClient) -> None:
    id = ok(post(client))["id"]
    other = {"authorization": "Bearer two"}
    assert error(client.get(f"{PATH}/{id}", headers=other), 404)
    assert ok(client.get(PATH, headers=other))["data"] == []
    assert error(client.get(PATH, headers=other, params={"after": id}))["param"] == "after"


@cases
def test_queries_that_are_refused(client: TestClient, query: Json) -> None:
    name = next(iter(query)).partition("[")[0]
    assert error(client.get(PATH, params=query))["param"] == name


def test_a_full_store_refuses_before_it_generates(
    tiny_path: Path, tmp_path: Path, engine: ScriptedEngine
) -> None:
    store = StoreSettings(data_dir=tmp_path, bytes=5000)
    with wire.client(tiny_path, engine, store) as client:
        while (response := post(client)).status_code == 200:
            assert len(listed(client)) < 20
        assert response.status_code == 507
        assert "DELETE /v1/chat/completions/ID" in json.loads(response.content)["error"]["message"]
        assert ok(post(client, store=False))
