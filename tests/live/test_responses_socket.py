"""Responses over a WebSocket, as OpenAI's own client and as others that are less polite use it."""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.live.replayed import LONG, MODEL, replaying
from tests.live.server import LiveServer, eventually
from tests.tables import cases

Json = dict[str, Any]
LIMIT = 200_000
DAMAGED = "damaged"
"""A model whose folder has no files."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    limits = {"max_body_bytes": LIMIT}
    damaged = {DAMAGED: {"source": str(tmp_path_factory.mktemp("damaged"))}}
    folder = tmp_path_factory.mktemp("socket")
    with replaying(folder, others=damaged, server=limits) as server:
        yield server
        assert "Traceback" not in server.log
        assert all(DAMAGED in line for line in server.log.splitlines() if " ERROR " in line)


@contextmanager
def connected(
    server: LiveServer, headers: dict[str, str] | None = None, host: str = "localhost"
) -> Iterator[ClientConnection]:
    with (
        socket.create_connection(("127.0.0.1", server.port)) as sock,
        connect(
            f"ws://{host}/v1/responses",
            sock=sock,
            additional_headers=headers,
            proxy=None,
            max_size=None,
            close_timeout=2,
        ) as found,
    ):
        yield found


@pytest.fixture
def line(server: LiveServer) -> Iterator[ClientConnection]:
    with connected(server) as found:
        yield found


def create(line: ClientConnection, text: Any = "poem", **more: Any) -> None:
    asked = {"type": "response.create", "model": MODEL, "input": text, **more}
    line.send(json.dumps(asked))


def event(line: ClientConnection) -> Json:
    found: Json = json.loads(line.recv(timeout=20))
    return found


def events(line: ClientConnection) -> list[Json]:
    """Of one response."""
    found = [event(line)]
    while found[-1]["type"] not in ("response.completed", "response.incomplete", "error"):
        found.append(event(line))
    return found


def answer(line: ClientConnection, text: Any = "poem", **more: Any) -> Json:
    create(line, text, **more)
    last = events(line)[-1]
    assert last["type"] == "response.completed", last
    response: Json = last["response"]
    return response


def refusal(line: ClientConnection) -> Json:
    found = event(line)
    assert found["type"] == "error", found
    assert found.keys() == {"type", "status", "error"}
    return {"status": found["status"], **found["error"]}


def said(response: Json) -> str:
    return "".join(item["content"][0]["text"] for item in response["output"])


def rest(server: LiveServer) -> None:
    eventually(server.idle, "rest")


def test_events_are_those_of_a_stream(server: LiveServer, line: ClientConnection) -> None:
    create(line)
    over_line = events(line)
    with server.openai() as client:
        over_http = list(client.responses.create(model=MODEL, input="poem", stream=True))
    assert [e["type"] for e in over_line] == [e.type for e in over_http]
    assert [e["sequence_number"] for e in over_line] == list(range(len(over_line)))
    assert said(over_line[-1]["response"]) == "Roses are red."


def test_one_after_another_in_order(line: ClientConnection) -> None:
    for text in ("steady", "poem", "steady", "other"):
        create(line, text)
    answers = [events(line) for _ in range(4)]
    reported = [said(reported[-1]["response"]) for reported in answers]
    steady = "One, two, three, four."
    assert reported == [steady, "Roses are red.", steady, "Yes."]
    ids = [{e["response"]["id"] for e in reported if "response" in e} for reported in answers]
    assert [len(one) for one in ids] == [1, 1, 1, 1]


@pytest.mark.parametrize("store", [True, False])
def test_a_chain_on_one_line(server: LiveServer, line: ClientConnection, store: bool) -> None:
    first = answer(line, "one", store=store)
    second = answer(line, "two", previous_response_id=first["id"], store=store)
    third = answer(line, "three", previous_response_id=second["id"], store=store)
    forked = answer(line, "three", previous_response_id=second["id"], store=store)
    tokens = [made["usage"]["input_tokens"] for made in (first, second, third, forked)]
    assert tokens[0] < tokens[1] < tokens[2] == tokens[3]
    with connected(server) as another:
        create(another, "x", previous_response_id=third["id"])
        last = events(another)[-1]
    if store:
        assert last["type"] == "response.completed"
        assert last["response"]["usage"]["input_tokens"] > tokens[2]
    else:
        assert last["error"]["code"] == "previous_response_not_found"
        assert last["status"] == 400


def test_what_is_stored_after_what_is_not(server: LiveServer, line: ClientConnection) -> None:
    first = answer(line, "one", store=False)
    second = answer(line, "two", previous_response_id=first["id"])
    with server.openai() as client:
        third = client.responses.create(
            model=MODEL, input="three", previous_response_id=second["id"]
        )
        assert third.usage
        assert third.usage.input_tokens > second["usage"]["input_tokens"]
        items = client.responses.input_items.list(second["id"], order="asc")
        assert [item.type for item in items.data] == ["message"] * 3


@cases
@pytest.mark.parametrize("store", [True, False])
def test_after_an_error_the_earlier_response_is_forgotten(
    line: ClientConnection, wrong: Json, status: int, store: bool
) -> None:
    first, other = (answer(line, "one", store=store)["id"] for _ in range(2))
    line.send(
        json.dumps(
            {
                "type": "response.create",
                "model": MODEL,
                "input": "two",
                "previous_response_id": first,
                "store": store,
                **wrong,
            }
        )
    )
    assert refusal(line)["status"] == status
    create(line, "two", previous_response_id=first, store=store)
    last = events(line)[-1]
    if store:
        assert last["type"] == "response.completed"
    else:
        assert last["error"]["code"] == "previous_response_not_found"
    assert answer(line, "two", previous_response_id=other, store=store)["output"]


def test_warming_up(line: ClientConnection) -> None:
    create(line, "one", generate=False, store=False)
    reported = events(line)
    warm = reported[-1]["response"]
    assert (warm["status"], warm["output"], len(reported)) == ("completed", [], 3)
    assert answer(line, "two", previous_response_id=warm["id"], store=False)["output"]


HOSTILE: list[tuple[str | bytes, int]] = [
    ("", 400),
    ("{", 400),
    ("[]", 400),
    ("null", 400),
    ("{}", 400),
    ('{"type": "response.create"}', 400),
    ('{"type": "response.steer"}', 400),
    ('{"type": ["response.create"]}', 400),
    ('{"type": "response.create", "type": "response.create"}', 400),
    (b'{"type": "response.create"}', 400),
    (b"\xff\xfe", 400),
    ("[" * 100_000, 400),
    ('{"type": "response.create", "model": "fake", "input": ' + "[" * 70 + "]" * 70 + "}", 400),
    ('{"type": "response.create", "model": "fake", "input": NaN}', 400),
    ('{"type": "response.create", "model": "fake", "input": "x", "background": true}', 400),
    ('{"type": "response.create", "model": "fake", "input": "x", "generate": 1}', 400),
    ('{"type": "response.create", "model": "fake", "input": "x", "temperature": 9}', 400),
    ('{"type": "response.create", "model": "none", "input": "x"}', 404),
    ('{"type": "response.create", "model": "fake", "input": "x", "conversation": "c"}', 404),
]


def test_hostile_frames_are_refused_and_the_line_stays(line: ClientConnection) -> None:
    for frame, status in HOSTILE:
        line.send(frame)
        assert refusal(line)["status"] == status, frame[:80]
    assert said(answer(line)) == "Roses are red."


def test_a_frame_that_is_too_large(server: LiveServer, line: ClientConnection) -> None:
    create(line, "x" * (LIMIT - 1000))
    assert refusal(line)["status"] == 400, "too long for the model"
    create(line, "x" * LIMIT)
    with pytest.raises(ConnectionClosed) as closed:
        event(line)
    assert closed.value.rcvd
    assert closed.value.rcvd.code == 1009
    rest(server)


def test_too_many_frames_at_once(server: LiveServer, line: ClientConnection) -> None:
    def crowd() -> None:
        for _ in range(20):  # perhaps it is closed before they are sent
            create(line, "slow")
        until_completed(iter(partial(event, line), None))

    with pytest.raises(ConnectionClosed) as closed:
        crowd()
    assert closed.value.rcvd
    assert closed.value.rcvd.code == 1008
    rest(server)


def test_a_client_that_leaves_cancels(server: LiveServer, line: ClientConnection) -> None:
    create(line, "slow")
    create(line, "poem")
    id = event(line)["response"]["id"]
    while event(line)["type"] != "response.output_text.delta":
        pass
    line.close()
    with server.openai() as client:
        eventually(
            lambda: client.responses.retrieve(id).status == "cancelled", "the cancelled response"
        )
        assert LONG.startswith(client.responses.retrieve(id).output_text)
    rest(server)


def test_a_server_that_leaves_says_so(tmp_path: Path) -> None:
    with replaying(tmp_path, server={"drain_seconds": 4}) as server:
        with connected(server) as idle, connected(server) as quick, connected(server) as slow:
            create(quick, "steady")
            create(slow, "slow")
            event(quick)
            event(slow)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                event(idle)
            assert closed.value.rcvd
            assert closed.value.rcvd.code in (1001, 1012)
            assert events(quick)[-1]["type"] == "response.completed", "it drains"
            while (reported := event(slow))["type"] != "response.failed":
                pass
            assert reported["response"]["error"]
        assert server.process.wait(20) == 0


def until_completed(line: Any) -> Any:
    for found in line:
        if getattr(found, "type", None) == "response.completed":
            return found
    raise AssertionError("the line ended")
