"""`include` of the routes that return stored items."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.api import wire
from tests.api.wire import TEXT, Json, ScriptedEngine, error, ok

PATH = "/v1/responses"
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
USER = {"role": "user", "content": "hi"}
IGNORED = "x-mlx-server-ignored"
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        yield client


def created(client: TestClient, **asked: Any) -> str:
    body = {"model": wire.MODEL, "input": [USER, THOUGHT, USER], **asked}
    id: str = ok(client.post(PATH, json=body))["id"]
    return id


def items(client: TestClient, id: str, query: str) -> list[Json]:
    found: list[Json] = ok(client.get(f"{PATH}/{id}/input_items?order=asc&{query}"))["data"]
    return found


@pytest.mark.parametrize("name", ["include", "include[]", "include[0]", "include%5B%5D"])
def test_reasoning_comes_sealed(client: TestClient, name: str) -> None:
    id = created(client)
    (_, thought, _) = items(client, id, f"{name}={ENCRYPTED}")
    sealed = thought["encrypted_content"]
    assert "Hm" not in str(base64.b64decode(sealed.partition(".")[2]))
    body = {"model": wire.MODEL, "input": [USER, {**thought, "content": None}, USER]}
    sent_back = client.post(PATH, json=body)
    assert ok(sent_back)
    assert IGNORED not in sent_back.headers  # one that can't be opened is listed
    assert not any("encrypted_content" in item for item in items(client, id, "limit=20"))


def test_log_probabilities_that_were_computed_are_there(client: TestClient) -> None:
    id = created(client, include=[LOGPROBS])
    response = client.get(f"{PATH}/{id}?include[]={LOGPROBS}")
    (message,) = ok(response)["output"]
    assert message["content"][0]["text"] == TEXT
    assert message["content"][0]["logprobs"]
    assert IGNORED not in response.headers


@pytest.mark.parametrize("value", [LOGPROBS, "web_search_call.results"])
def test_what_is_not_there_is_listed(client: TestClient, value: str) -> None:
    response = client.get(f"{PATH}/{created(client)}?include={value}")
    assert ok(response)["output"]
    assert response.headers[IGNORED] == f"include.{value}"


@pytest.mark.parametrize("value", ["", "everything", "x" * 5000])
def test_other_values_are_refused(client: TestClient, value: str) -> None:
    id = created(client)
    for path in (f"{PATH}/{id}", f"{PATH}/{id}/input_items", "/v1/conversations/conv_x/items"):
        assert error(client.get(path, params={"include": value}))["param"] == "include"


def test_items_that_are_added_come_with_it_too(client: TestClient) -> None:
    id = ok(client.post("/v1/conversations", json={}))["id"]
    path = f"/v1/conversations/{id}/items?include={ENCRYPTED}&include=web_search_call.results"
    response = client.post(path, json={"items": [USER, THOUGHT]})
    (_, thought) = ok(response)["data"]
    assert thought["encrypted_content"]
    assert response.headers[IGNORED] == "include.web_search_call.results"


def test_obfuscation_that_is_asked_for_is_listed(client: TestClient) -> None:
    path = f"{PATH}/{created(client)}"
    assert IGNORED not in client.get(path, params={"include_obfuscation": "false"}).headers
    listed = client.get(path, params={"include_obfuscation": "true"}).headers[IGNORED]
    assert listed == "include_obfuscation"
