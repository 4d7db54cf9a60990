"""Streams whose clients connect again: `x-mlx-server-resumable` and `GET .../stream?after=N`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from tests.api import wire
from tests.api.leaving import Leaver
from tests.api.messages.talking import error as messages_error
from tests.api.wire import Json, ScriptedEngine, error

CHAT = "/v1/chat/completions"
ASKED: Json = {"model": wire.MODEL, "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, Json] = {
    CHAT: ASKED,
    "/v1/messages": {**ASKED, "max_tokens": 20},
    "/v1/completions": {"model": wire.MODEL, "prompt": "hi"},
}
WANTED = {"x-mlx-server-resumable": "true"}
SECONDS = 0.05


@pytest.fixture
def client(tiny_path: Path) -> Iterator[TestClient]:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        yield client


def begun(client: TestClient, path: str = CHAT, **headers: str) -> tuple[str, str]:
    """The route of the stream, and its frames."""
    body = {**BODIES[path], "stream": True}
    response = client.post(path, json=body, headers={**WANTED, **headers})
    assert response.status_code == 200, response.text
    return f"{path}/{response.headers['x-mlx-server-stream']}/stream", response.text


def frames_of(text: str) -> list[str]:
    return [f"{frame}\n\n" for frame in text.split("\n\n") if frame]


@pytest.mark.parametrize("path", BODIES)
def test_the_rest_after_each_number(client: TestClient, path: str) -> None:
    route, text = begun(client, path)
    frames = frames_of(text)
    assert len(frames) > 3
    for number, frame in enumerate(frames, 1):
        assert frame.startswith(f"id: {number}\n")
    plain = client.post(path, json={**BODIES[path], "stream": True}).text
    assert len(frames_of(plain)) == len(frames)
    assert "id: 1\n" not in plain
    for after in range(len(frames) + 1):
        rest = client.get(route, params={"after": after})
        assert rest.text == "".join(frames[after:])
        assert rest.headers["content-type"].startswith("text/event-stream")
    # a browser repeats the URL, and says in a header how far it has come
    seen = {"last-event-id": "2"}
    assert client.get(route, params={"after": 1}, headers=seen).text == "".join(frames[2:])
    assert client.get(route).text == text


@pytest.mark.parametrize("after", ["-1", "x", "1e3", "", "٣", "99", "9" * 15, "9" * 400, "0x1"])
def test_a_wrong_number(client: TestClient, after: str) -> None:
    route, _ = begun(client)
    assert error(client.get(route, params={"after": after}), 400)["param"] == "after"
    header = {b"last-event-id": after.encode()}
    assert error(client.get(route, headers=header), 400)["param"] == "after"


def test_only_the_key_and_the_route_of_the_request_find_it(tiny_path: Path) -> None:
    keys = (wire.key("one"), wire.key("two"))
    with wire.client(tiny_path, ScriptedEngine(), api_keys=keys) as client:
        own, others = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
        route, text = begun(client, **own)
        assert client.get(route, headers=own).text == text
        error(client.get(route, headers=others), 404)
        error(client.get(route), 401)
        other = route.replace(CHAT, "/v1/messages")
        messages_error(client.get(other, headers=own), 404, "not_found_error")


def test_a_header_that_does_nothing_is_named(client: TestClient) -> None:
    wrong = client.post(CHAT, json=ASKED, headers={"x-mlx-server-resumable": "yes"})
    assert "x-mlx-server-resumable" in error(wrong, 400)["message"]
    for path, body in (CHAT, ASKED), ("/api/chat", {**ASKED, "stream": True}):
        response = client.post(path, json=body, headers=WANTED)
        assert "x-mlx-server-resumable" in response.headers["x-mlx-server-ignored"]
        assert "x-mlx-server-stream" not in response.headers


def test_it_goes_on_without_a_client_and_then_ends(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        engine = ScriptedEngine()
        engine.silent = True
        app = wire.app(tiny_path, engine)
        async with app.router.lifespan_context(app):
            leaver = Leaver({**ASKED, "stream": True}, headers=WANTED)
            await app(leaver.scope, leaver.receive, leaver.send)
            assert engine.running
            while engine.running:  # noqa: ASYNC110  its end shows nowhere else
                await asyncio.sleep(SECONDS)
            headers = dict(leaver.sent[0]["headers"])
            id = headers[b"x-mlx-server-stream"].decode()
            late = Leaver(None, path=f"{CHAT}/{id}/stream")
            await app(late.scope, late.receive, late.send)
            assert late.sent[0]["status"] == 404

    monkeypatch.setattr(limits, "RESUMABLE_SECONDS", SECONDS)
    asyncio.run(asyncio.wait_for(test(), 30))


def test_it_is_forgotten_a_while_after_its_end(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RESUMABLE_SECONDS", 0)
    route, _ = begun(client)
    for _ in range(100):
        if client.get(route).status_code == 404:
            return
    raise AssertionError("it is kept")


@pytest.mark.parametrize("limit", ["RESUMABLE_STREAMS", "RESUMABLE_PER_CLIENT"])
def test_streams_that_have_ended_make_room(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(limits, limit, 2)
    routes = [begun(client)[0] for _ in range(3)]
    assert [client.get(route).status_code for route in routes] == [404, 200, 200]


@pytest.mark.parametrize("limit", ["RESUMABLE_STREAMS", "RESUMABLE_PER_CLIENT"])
def test_streams_that_run_or_begin_make_none(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    async def test() -> list[int]:
        engine = ScriptedEngine()
        engine.silent = True
        app = wire.app(tiny_path, engine)
        async with app.router.lifespan_context(app):
            leavers = [Leaver({**ASKED, "stream": True}, headers=WANTED) for _ in range(4)]
            await asyncio.gather(*(app(each.scope, each.receive, each.send) for each in leavers))
        return sorted(each.sent[0]["status"] for each in leavers)

    monkeypatch.setattr(limits, limit, 2)
    assert asyncio.run(test()) == [200, 200, 503, 503]


def test_events_make_room_for_each_other_and_then_end_the_answer(
    client: TestClient, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = begun(client)
    monkeypatch.setattr(limits, "RESUMABLE_BYTES", len(text))
    with wire.client(tiny_path, ScriptedEngine()) as narrow:
        routes = []
        for _ in range(2):
            route, whole = begun(narrow)
            assert len(whole) == len(text)
            routes.append(route)
        assert [narrow.get(route).status_code for route in routes] == [404, 200]
    monkeypatch.setattr(limits, "RESUMABLE_BYTES", len(text) // 2)
    with wire.client(tiny_path, ScriptedEngine()) as narrow:
        _, cut = begun(narrow)
        assert "response_too_large" in cut
        assert cut.endswith("data: [DONE]\n\n")
