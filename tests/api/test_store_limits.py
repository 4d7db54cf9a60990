"""What the store lets requests keep and read back, over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from mlx_server import limits
from mlx_server.api.responses.runs import Runs
from mlx_server.config.settings import StoreSettings
from mlx_server.engine.client import RowStream
from mlx_server.engine.messages import Generate
from tests.api import wire
from tests.api.leaving import Leaver
from tests.api.wire import Json, ScriptedEngine, error, ok
from tests.store.make import limit

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
BODY_BYTES = 20_000


def asked(text: str = "a", **more: Any) -> Json:
    return {"model": wire.MODEL, "input": text, "max_output_tokens": 2, **more}


def hosted(size: int, **more: Any) -> Json:
    """An item that no model reads, of any size."""
    return {"type": "web_search_call", "padding": "x" * size, **more}


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with wire.client(tiny_path, ScriptedEngine(), max_body_bytes=BODY_BYTES) as client:
        yield client


def chained(client: TestClient, sizes: list[int]) -> str:
    id = None
    for size in sizes:
        body = asked(previous_response_id=id) | {"input": [hosted(size), *SAID]}
        id = ok(client.post(RESPONSES, json=body))["id"]
    assert id
    return str(id)


SAID: list[Json] = [{"role": "user", "content": "a"}]


def test_what_is_read_back_counts_as_the_requests_size(client: TestClient) -> None:
    id = chained(client, [6000, 6000, 1000])
    ok(client.post(RESPONSES, json=asked(previous_response_id=id)))
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        large = asked("b", previous_response_id=id, client_metadata="x" * 7000)
        found = error(client.post(path, json=large), status=413)
        assert found["code"] == "request_too_large"
        assert found["param"] == "previous_response_id"
        assert "`server.max_body_bytes`" in found["message"]
        assert "Start a new conversation" in found["message"]
    other = chained(client, [6000])
    ok(client.post(RESPONSES, json=asked(previous_response_id=other, client_metadata="x" * 7000)))


def test_a_conversation_counts_too(client: TestClient) -> None:
    made = ok(client.post(CONVERSATIONS, json={"items": [hosted(9000)]}))["id"]
    ok(client.post(RESPONSES, json=asked(conversation=made)))
    ok(client.post(f"{CONVERSATIONS}/{made}/items", json={"items": [hosted(9500)]}))
    ok(client.post(f"{CONVERSATIONS}/{made}/items", json={"items": [hosted(9500)]}))
    found = error(client.post(RESPONSES, json=asked(conversation=made)), status=413)
    assert found["param"] == "conversation"


def test_references_count_each_time(client: TestClient) -> None:
    item = ok(client.post(CONVERSATIONS, json={"items": [hosted(4000, id="ws_one")]}))
    assert item
    reference = {"type": "item_reference", "id": "ws_one"}
    ok(client.post(RESPONSES, json=asked(store=False) | {"input": [reference] * 4 + SAID}))
    found = error(
        client.post(RESPONSES, json=asked(store=False) | {"input": [reference] * 5 + SAID}),
        status=413,
    )
    assert found["param"] == "input"
    found = error(client.post(CONVERSATIONS, json={"items": [reference] * 5}), status=413)
    assert found["param"] == "input"


def test_only_so_many_references(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "ITEM_REFERENCES", 3)
    references = [{"type": "item_reference", "id": f"{n}"} for n in range(4)]
    found = error(client.post(RESPONSES, json=asked() | {"input": references}))
    assert "4 item references; the limit is 3" in found["message"]


def test_many_small_things_are_read_back_no_more_than_they_are_read(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested = hosted(1, deep=[[] for _ in range(200)])
    id = ok(client.post(RESPONSES, json=asked() | {"input": [nested, *SAID]}))["id"]
    monkeypatch.setattr(limits, "JSON_NODES", 150)
    found = error(client.post(RESPONSES, json=asked(previous_response_id=id)))
    assert "earlier items of this request are too large" in found["message"]
    assert found["param"] == "previous_response_id"


def test_a_full_store_says_what_to_do(tiny_path: Path, tmp_path: Path) -> None:
    store = StoreSettings(data_dir=tmp_path, bytes=100_000)
    keys: Any = {"api_keys": (wire.key("one"), wire.key("two"))}
    engine = ScriptedEngine()
    with wire.client(tiny_path, engine, store, **keys) as client:
        one, two = {"x-api-key": "one"}, {"x-api-key": "two"}
        body = asked() | {"input": [hosted(20_000), *SAID]}
        ids = [ok(client.post(RESPONSES, json=body, headers=one))["id"] for _ in range(2)]
        taken = len(engine.taken)
        for more in ({}, {"stream": True}, {"background": True}):
            response = client.post(RESPONSES, json={**body, **more}, headers=one)
            found = error(response, status=507)
            assert found["code"] == "store_full"
            assert response.headers["x-should-retry"] == "false"
        assert "`store.bytes`" in found["message"]
        assert len(engine.taken) == taken, "nothing is generated for it"
        error(client.post(CONVERSATIONS, json={"items": [hosted(20_000)]}, headers=one), status=507)
        ok(client.post(RESPONSES, json={**body, "store": False}, headers=one))
        ok(client.post(RESPONSES, json=body, headers=two))
        ok(client.delete(f"{RESPONSES}/{ids[0]}", headers=one))
        ok(client.post(RESPONSES, json=body, headers=one))


def test_an_answer_that_finds_no_room_is_told_but_not_stored(
    tiny_path: Path, tmp_path: Path
) -> None:
    store = StoreSettings(data_dir=tmp_path, bytes=44_000)
    with wire.client(tiny_path, ScriptedEngine(), store) as client:
        body = asked(max_output_tokens=20, top_logprobs=20) | {"input": [hosted(18_000), *SAID]}
        response = ok(client.post(RESPONSES, json=body))
        assert response["output"]
        assert response["store"] is False
        stored = ok(client.get(f"{RESPONSES}/{response['id']}"))
        assert (stored["status"], stored["output"]) == ("failed", [])


def test_no_more_is_begun_while_ends_can_not_be_stored(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "UNSTORED_ENDS", 0)
    with wire.client(tiny_path, ScriptedEngine()) as client:
        found = error(client.post(RESPONSES, json=asked()), status=503)
        assert found["code"] == "store_unavailable"
        assert "store: false" in found["message"]


def test_a_key_has_so_many_in_the_background(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "BACKGROUND_PER_CLIENT", 2)
    engine = ScriptedEngine()
    engine.silent = True
    keys: Any = {"api_keys": (wire.key("one"), wire.key("two"))}
    with wire.client(tiny_path, engine, **keys) as client:
        one, two = {"x-api-key": "one"}, {"x-api-key": "two"}
        body = asked(background=True)
        ids = [ok(client.post(RESPONSES, json=body, headers=one))["id"] for _ in range(2)]
        found = error(client.post(RESPONSES, json=body, headers=one), status=503)
        assert found["code"] == "overloaded"
        other = ok(client.post(RESPONSES, json=body, headers=two))["id"]
        for id, key in ((ids[0], one), (ids[1], one), (other, two)):
            ok(client.post(f"{RESPONSES}/{id}/cancel", headers=key))
        again = ok(client.post(RESPONSES, json=body, headers=one))["id"]
        ok(client.post(f"{RESPONSES}/{again}/cancel", headers=one))


def test_logs_of_all_in_the_background_have_one_limit(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "STREAM_LOGS_BYTES", 100_000)
    engine = ScriptedEngine()
    engine.silent = True
    with wire.client(tiny_path, engine) as client:
        app: Any = client.app
        runs: Runs = app.state.runs
        body = asked(background=True, stream=True, instructions="x" * 45_000)
        error(client.post(RESPONSES, json={**body, "instructions": "x" * 200_000}), status=503)
        assert runs.logs.used == 0, "what was refused gives back what it took"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engine, "silent", False)
            text = client.post(RESPONSES, json={**body, "instructions": "x"}).text
        assert "response.incomplete" in text
        assert runs.logs.used == 0, "what has ended is in the store"


class HeldEngine(ScriptedEngine):
    """It says nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()

    @asynccontextmanager
    async def generate(self, rows: Sequence[Generate]) -> AsyncIterator[RowStream]:
        await self.goes_on.wait()
        async with super().generate(rows) as answers:
            yield answers


@dataclass
class StreamReader:
    """A client that takes one event, and the others when it may."""

    events: list[Json] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, message: Message) -> None:
        data = message.get("body", b"").decode().partition("data: ")[2]
        if data.startswith("{"):
            self.events.append(json.loads(data))
            self.begun.set()
            await self.goes_on.wait()


def test_a_reader_goes_on_from_the_store(tiny_path: Path) -> None:
    """One that was slower than the answer."""

    async def read() -> list[list[int]]:
        engine = HeldEngine()
        app = wire.app(tiny_path, engine)
        body = asked(background=True, stream=True)
        sender, slow = Leaver(body, asyncio.Event(), path=RESPONSES), StreamReader()
        posted = StreamReader()
        posted.goes_on.set()
        async with app.router.lifespan_context(app):
            posting = asyncio.create_task(app(sender.scope, sender.receive, posted.send))
            await posted.begun.wait()
            id = posted.events[0]["response"]["id"]
            path, raw = f"{RESPONSES}/{id}", f"{RESPONSES}/{id}".encode()
            scope = {**sender.scope, "method": "GET", "path": path, "raw_path": raw}
            scope |= {"query_string": b"stream=true", "headers": [(b"host", b"localhost")]}
            reading = asyncio.create_task(
                app(scope, Leaver({}, asyncio.Event()).receive, slow.send)
            )
            await slow.begun.wait()
            engine.goes_on.set()
            await posting
            assert len(slow.events) == 1
            slow.goes_on.set()
            await reading
        return [[event["sequence_number"] for event in each.events] for each in (posted, slow)]

    quick, slow = asyncio.run(read())
    assert slow == quick == list(range(len(quick)))
    assert len(quick) > 5
