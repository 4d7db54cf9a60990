"""Nothing keeps the names that clients make up: however many they send, no collection grows."""

import gc
import logging
import sqlite3
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from tests.api import wire
from tests.api.wire import MODEL, ScriptedEngine

WARM = 8
SIZED = (dict, list, set, deque)

HI = [{"role": "user", "content": "Hi"}]
UNREACHABLE = "http://127.0.0.1:1/"


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(tiny_path: Path, engine: ScriptedEngine) -> Iterator[TestClient]:
    logging.disable()  # pytest keeps what is logged
    with wire.client(tiny_path, engine, adapter_dirs=(tiny_path,)) as client:
        yield client
    logging.disable(logging.NOTSET)


def send(client: TestClient, number: int) -> None:
    """One of each, with a name of its own wherever a client may choose one."""
    name = f"name-{number:06}"
    headers = {"x-request-id": name, f"x-{name}": name, "authorization": f"Bearer {name}"}
    tool = {"type": "function", "function": {"name": name, "parameters": {"title": name}}}
    chat: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 1}
    response: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 16}
    mcp = {"type": "mcp", "server_label": name, "server_url": UNREACHABLE + name}
    for path, body in (
        ("chat/completions", {**chat, "user": name, name: 1, "metadata": {name: name}}),
        ("chat/completions", {**chat, "stop": [name], "logit_bias": {str(number % 300): 1}}),
        ("chat/completions", {**chat, "tools": [tool]}),
        ("chat/completions", {**chat, "model": name}),
        ("chat/completions", {**chat, "adapter": name}),
        ("chat/completions", {**chat, "response_format": json_schema(name)}),
        ("completions", {"model": MODEL, "prompt": name, "max_tokens": 1}),
        ("responses", {**response, "store": False, "metadata": {name: name}, "user": name}),
        ("responses", {**response, "store": False, "prompt_cache_key": name}),
        ("responses", {**response, "previous_response_id": name}),
        ("responses", {**response, "conversation": name}),
        ("responses", {**response, "store": False, "tools": [mcp]}),
        ("load_lora_adapter", {"lora_name": name, "lora_path": f"/{name}"}),
        ("unload_lora_adapter", {"lora_name": name}),
    ):
        client.post(f"/v1/{path}", json=body, headers=headers)
    for path in (f"/{name}", f"/v1/models/{name}", f"/v1/responses/{name}", f"/v1/{name}/{name}"):
        client.get(path, headers=headers)
    client.request(name.upper(), "/v1/models", headers=headers)


def json_schema(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {name: {"type": "string"}}}
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def collections() -> dict[int, Any]:
    """Those too of which the garbage collector keeps no account, as they hold texts alone."""
    gc.unfreeze()  # the app has frozen what was there at its start
    gc.collect()
    known = gc.get_objects()
    found = (*known, *gc.get_referents(*known))
    # there are a million objects, but few types
    sized = {kind for kind in set(map(type, found)) if issubclass(kind, SIZED)}
    return {id(one): one for one in found if type(one) in sized}


TIMES = 8


def of_databases() -> set[int]:
    """The ids of what a connection refers to: it makes a new list of cursors, without those that
    are gone, when it has made 200."""
    found = (one for one in gc.get_objects() if isinstance(one, sqlite3.Connection))
    return {id(each) for one in found for each in gc.get_referents(one)}


@pytest.mark.alone  # what measures coverage has collections that grow
def test_no_collection_grows_with_the_names_that_clients_send(
    client: TestClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COMPILED_SCHEMAS", WARM)  # it is full before the sizes are taken
    for number in range(WARM):
        send(client, number)
    held = collections()  # so that no new one has the id of one that is gone
    known = of_databases()
    before = {id: len(one) for id, one in held.items()}
    for number in range(WARM, WARM + TIMES):
        send(client, number)
    engine.taken.clear()
    after = collections()
    grown = [id for id in after.keys() & before if len(after[id]) >= before[id] + TIMES // 2]
    grown = [id for id in grown if getattr(after[id], "maxlen", None) is None]
    grown = [id for id in grown if id not in known | of_databases()]
    shown = [repr(after[id]) for id in grown]
    shown = [text[:300] for text in shown if "_lru_list_elem" not in text]  # caches with a limit
    assert shown == []


def test_metrics_have_labels_of_known_models_only(client: TestClient) -> None:
    send(client, 10**5)
    assert "name-" not in client.get("/metrics").text
