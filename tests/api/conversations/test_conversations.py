"""`/v1/conversations`, with OpenAI's own types as the judge."""

from pathlib import Path

import pytest
from openai.types.conversations import (
    Conversation,
    ConversationDeletedResource,
    ConversationItemList,
    Message,
)
from starlette.testclient import TestClient

from tests.api import wire
from tests.api.wire import Json, ScriptedEngine, error, ok

PATH = "/v1/conversations"
SAID: list[Json] = [{"type": "message", "role": "user", "content": f"{n}"} for n in range(3)]


@pytest.fixture
def place(client: TestClient) -> str:
    """Of a conversation of three messages."""
    made = ok(client.post(PATH, json={"items": SAID}))
    return f"{PATH}/{made['id']}"


def texts(page: Json) -> list[str]:
    return [item["content"][0]["text"] for item in page["data"]]


def test_one_is_made_found_changed_and_deleted(client: TestClient) -> None:
    made = ok(client.post(PATH, json={"metadata": {"a": "b"}}))
    Conversation.model_validate(made, strict=True)
    assert made["metadata"] == {"a": "b"}
    place = f"{PATH}/{made['id']}"
    assert ok(client.get(place)) == made
    changed = ok(client.post(place, json={"metadata": {"c": "d"}}))
    assert changed == {**made, "metadata": {"c": "d"}} == ok(client.get(place))
    deleted = ok(client.delete(place))
    ConversationDeletedResource.model_validate(deleted, strict=True)
    for method in ("GET", "DELETE"):
        assert error(client.request(method, place), status=404)["code"] == "not_found"


def test_an_empty_one(client: TestClient) -> None:
    bodies: list[Json] = [{}, {"items": None, "metadata": None}, {"items": []}]
    for body in bodies:
        made = ok(client.post(PATH, json=body))
        assert made["metadata"] == {}
        page = ok(client.get(f"{PATH}/{made['id']}/items"))
        assert (page["data"], page["has_more"]) == ([], False)


def test_items_come_in_pages(client: TestClient, place: str) -> None:
    newest = ok(client.get(f"{place}/items"))
    ConversationItemList.model_validate(newest, strict=True)
    assert texts(newest) == ["2", "1", "0"]
    first = ok(client.get(f"{place}/items", params={"limit": 2, "order": "asc"}))
    assert (texts(first), first["has_more"]) == (["0", "1"], True)
    after = {"after": first["last_id"], "order": "asc"}
    assert texts(ok(client.get(f"{place}/items", params=after))) == ["2"]
    assert error(client.get(f"{place}/items", params={"after": "none"}))["param"] == "after"
    assert error(client.get(f"{place}/items", params={"limit": 0}))["param"] == "limit"


def test_items_are_added_found_and_deleted(client: TestClient, place: str) -> None:
    more = {"items": [{"role": "assistant", "content": "3"}, {"role": "user", "content": "4"}]}
    added = ok(client.post(f"{place}/items", json=more))
    assert texts(added) == ["3", "4"]
    id = added["data"][0]["id"]
    found = ok(client.get(f"{place}/items/{id}"))
    assert found == added["data"][0]
    Message.model_validate(found, strict=True)
    conversation = ok(client.delete(f"{place}/items/{id}"))
    assert place.endswith(conversation["id"])
    assert texts(ok(client.get(f"{place}/items"))) == ["4", "2", "1", "0"]
    for method in ("GET", "DELETE"):
        error(client.request(method, f"{place}/items/{id}"), status=404)


def test_items_may_be_references(client: TestClient, place: str) -> None:
    id = ok(client.get(f"{place}/items"))["last_id"]
    other = ok(client.post(PATH, json={"items": [{"type": "item_reference", "id": id}]}))
    assert texts(ok(client.get(f"{PATH}/{other['id']}/items"))) == ["0"]
    unknown = [{"type": "item_reference", "id": "msg_none"}, *SAID[:1]]
    made = client.post(PATH, json={"items": unknown})
    assert made.headers["x-mlx-server-ignored"] == "items.item_reference"
    assert len(ok(client.get(f"{PATH}/{ok(made)['id']}/items"))["data"]) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": SAID * 7}, "items"),
        ({"items": {}}, "items"),
        ({"items": [5]}, "items[0]"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ],
)
def test_what_can_not_be(client: TestClient, body: Json, param: str) -> None:
    assert str(error(client.post(PATH, json=body))["param"]).startswith(param)


def test_items_of_other_apis_are_reported(client: TestClient) -> None:
    made = client.post(PATH, json={"items": [{"type": "nonsense"}, *SAID]})
    assert made.headers["x-mlx-server-ignored"] == "items.nonsense"
    assert len(ok(client.get(f"{PATH}/{ok(made)['id']}/items"))["data"]) == 4


def test_an_id_is_there_once(client: TestClient, place: str) -> None:
    item = {**SAID[0], "id": "msg_mine"}
    ok(client.post(f"{place}/items", json={"items": [item]}))
    error(client.post(f"{place}/items", json={"items": [item]}))
    error(client.post(PATH, json={"items": [item, item]}))


def test_keys_do_not_share(tiny_path: Path) -> None:
    keys = (wire.key("one"), wire.key("two"))
    one, two = {"x-api-key": "one"}, {"x-api-key": "two"}
    with wire.client(tiny_path, ScriptedEngine(), api_keys=keys) as client:
        made = ok(client.post(PATH, json={"items": SAID}, headers=one))
        place = f"{PATH}/{made['id']}"
        item = ok(client.get(f"{place}/items", headers=one))["first_id"]
        for method, path, body in (
            ("GET", place, None),
            ("DELETE", place, None),
            ("POST", place, {"metadata": {}}),
            ("GET", f"{place}/items", None),
            ("POST", f"{place}/items", {"items": SAID}),
            ("GET", f"{place}/items/{item}", None),
            ("DELETE", f"{place}/items/{item}", None),
        ):
            error(client.request(method, path, json=body, headers=two), status=404)
        assert len(ok(client.get(f"{place}/items", headers=one))["data"]) == 3
