"""The events of a request become one body or a stream, whatever the endpoint makes of them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from mlx_server.api.handlers import PrependedEvents, json_response, respond
from mlx_server.api.security import authorise
from mlx_server.errors import ContextTooLong, EngineDied
from mlx_server.events import Event, Started, TextDelta
from mlx_server.generation.overflow import PromptOverflow
from mlx_server.requests import GenerateRequest
from tests.api import wire
from tests.api.wire import MODEL, TEXT, ScriptedEngine
from tests.live.server import eventually


class Names:
    """Folds events into the names of their types."""

    async def aggregate(self, events: AsyncIterator[Event]) -> Mapping[str, Any]:
        found = [event async for event in events]
        text = "".join(event.text for event in found if isinstance(event, TextDelta))
        return {"first": type(found[0]).__name__, "last": type(found[-1]).__name__, "text": text}

    async def chunks(self, events: AsyncIterator[Event]) -> AsyncGenerator[Mapping[str, Any]]:
        async for event in events:
            yield {"name": type(event).__name__}


def too_long(overflow: PromptOverflow, tokens: int) -> ContextTooLong:
    return ContextTooLong(f"{tokens} are too many here.", param="own")


async def endpoint(http: Request) -> Response:
    await authorise([])(http)
    query = http.query_params
    request = GenerateRequest(query.get("model", MODEL), ("a" * int(query.get("size", 1)),), seed=1)
    stream, ignored = "stream" in query, [name for name in ("é",) if "ignored" in query]
    return await respond(http, request, Names(), stream=stream, ignored=ignored, overflow=too_long)


@pytest.fixture(scope="module")
def client(tiny_path: Path, engine: ScriptedEngine) -> Iterator[TestClient]:
    app = wire.app(tiny_path, engine)
    app.router.routes.insert(0, Route("/own", endpoint))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


pytestmark = pytest.mark.usefixtures("_as_before")


def test_one_body_is_made_of_all_events(client: TestClient) -> None:
    assert wire.ok(client.get("/own")) == {"first": "Started", "last": "Finished", "text": TEXT}


def test_a_stream_has_a_chunk_for_each_event(client: TestClient) -> None:
    names = [event["name"] for event in wire.events(client.get("/own?stream"))]
    assert (names[0], names[-1], {*names[1:-1]}) == ("Started", "Finished", {"TextDelta"})


@pytest.mark.parametrize("stream", ["", "&stream"])
def test_what_is_ignored_is_in_the_header_of_both(client: TestClient, stream: str) -> None:
    assert client.get(f"/own?ignored{stream}").headers["x-mlx-server-ignored"] == "%C3%A9"
    assert "x-mlx-server-ignored" not in client.get(f"/own?{stream}").headers


@pytest.mark.parametrize("stream", ["", "&stream"])
def test_an_error_before_the_engine_accepts_has_its_status_also_for_a_stream(
    client: TestClient, stream: str
) -> None:
    assert wire.error(client.get(f"/own?model=none{stream}"), 404)["code"] == "model_not_found"
    error = wire.error(client.get(f"/own?size=100000{stream}"))
    assert (error["param"], error["message"]) == ("own", "100000 are too many here.")


def test_an_error_in_the_answer_fails_the_body_and_ends_the_stream(
    client: TestClient, engine: ScriptedEngine
) -> None:
    engine.failure = EngineDied("It is gone.")
    assert wire.error(client.get("/own"), 503)["message"] == "It is gone."
    response = client.get("/own?stream")
    assert response.status_code == 200, "which is sent already"
    *_, last = wire.events(response)
    assert last["error"]["message"] == "It is gone."
    eventually(lambda: not engine.running, "both answers have left the engine")


@pytest.mark.parametrize("rest", [[], [TextDelta(0, "a"), TextDelta(0, "b")]])
def test_an_event_in_front_comes_once_and_first(rest: list[Event]) -> None:
    first = Started("m", 1)

    async def others() -> AsyncGenerator[Event]:
        for event in rest:
            yield event

    async def read() -> list[Event]:
        return [event async for event in PrependedEvents(first, others())]

    assert asyncio.run(read()) == [first, *rest]


def test_json_is_utf_8_with_the_headers_that_are_given() -> None:
    response = json_response({"a": "é\n"}, {"x-own": "1"})
    assert response.body == '{"a":"é\\n"}'.encode()
    assert (response.headers["content-type"], response.headers["x-own"]) == (
        "application/json",
        "1",
    )
    assert json_response([]).body == b"[]"
