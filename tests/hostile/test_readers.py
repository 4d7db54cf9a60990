"""A client that does not read: little is kept for it, not for long, and no one waits for it."""

import asyncio
import json
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_server.config.settings import Settings, validated
from mlx_server.engine.messages import PauseRows, Report, StepOutput, UnpauseRows
from mlx_server.generation.relay import RowRelay
from tests.hostile.inside import LONG, Inside, request, reset, serving
from tests.live.server import UPGRADE, eventually
from tests.worker.batch_runs import MIXED, ids
from tests.worker.constrained_decoding.grammars import GRAMMARS, loaded
from tests.worker.engine_runs import ask, failures, of, run, tokens_of

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MODEL = "fake"
MOST_BYTES = 1 << 20
SAID = {"Long": "No end. " * 250, "Quick": "No end. " * 250, "Short": "One, two, three, four."}
DETAILED: dict[str, Any] = {"logprobs": True, "top_logprobs": 20}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("readers")
    said = folder / "said.jsonl"
    # no model's step is shorter: one of no time takes hundreds of steps until it hears of a pause
    slow = {"Long": 1.0, "Short": 2.0}
    said_so = [{"match": t, "output": o, "delay_ms": slow.get(t, 0)} for t, o in SAID.items()]
    lines = [json.dumps(entry) for entry in said_so]
    said.write_text("\n".join(lines), "utf-8")
    model = {"source": f"replay:{said}", "family": "plain", "preload": True}
    return validated(Settings, {"server": {"port": 0}, "models": {MODEL: model}})


@pytest.fixture(scope="module")
def server(settings: Settings) -> Iterator[Inside]:
    with serving(settings) as found, patience(found, LONG):
        yield found


@pytest.fixture(autouse=True)
def _left_as_it_was(server: Inside) -> Iterator[None]:
    yield
    eventually(server.is_free, "nothing is held")


def chat(text: str = "Long", **more: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return request(CHAT, {"model": MODEL, "messages": messages, "stream": True, **more})


def response(**more: Any) -> bytes:
    detailed = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    body = {"model": MODEL, "input": "Long", "stream": True}
    return request(RESPONSES, {**body, **detailed, **more})


def frame() -> bytes:
    """With a mask of zeros."""
    asked = json.loads(response().partition(b"\r\n\r\n")[2]) | {"type": "response.create"}
    text = json.dumps(asked).encode()
    return struct.pack("!BBHI", 0x81, 0x80 | 126, len(text), 0) + text


STREAMS = {
    "chat": chat(**DETAILED),
    "chat, four answers": chat(n=4, **DETAILED),
    "response": response(),
    "WebSocket": UPGRADE,
}
WHOLE = chat("Quick", stream=False, **DETAILED)


@contextmanager
def patience(server: Inside, seconds: float) -> Iterator[None]:
    kinds: list[Any] = [server.server.config.http_protocol_class]
    kinds.append(server.server.config.ws_protocol_class)
    before = [kind.send_seconds for kind in kinds]
    try:
        for kind in kinds:
            kind.send_seconds = seconds
        yield
    finally:
        for kind, had in zip(kinds, before, strict=True):
            kind.send_seconds = had


def stalled(server: Inside, sent: bytes) -> socket.socket:
    client = server.connect(receive_bytes=4096)
    client.sendall(sent)
    if sent is UPGRADE:
        while not client.recv(1 << 12).endswith(b"\r\n\r\n"):
            pass
        client.sendall(frame())
    return client


def connections(server: Inside) -> list[Any]:
    return list(server.server.server_state.connections)


def held(server: Inside) -> int:
    """Requests."""
    return server.within(
        lambda: sum(a.is_paused for a in {*server.pool.engines[0].engine.row_streams.values()})
    )


def is_full(server: Inside) -> bool:
    """One client's connection takes no more, and its rows are held."""
    return held(server) == 1 and buffered(server) > 0


def buffered(server: Inside) -> int:
    """Bytes that the kernel does not take."""
    sizes = [c.transport.get_write_buffer_size() for c in connections(server)]
    return sum(sizes)


@pytest.mark.parametrize("kind", STREAMS)
def test_what_is_kept(server: Inside, kind: str) -> None:
    """And others are served meanwhile, in steps that are all theirs."""
    with stalled(server, STREAMS[kind]):
        eventually(lambda: is_full(server), "its rows are held")
        assert "".join(read(server, chat("Short"))) == SAID["Short"]
        sizes = [len(step.tokens) for step in server.steps if step.tokens]
        assert sizes[-10:] == [1] * 10
        assert is_full(server)
        # the part in progress was unread before, and was as much
        kept = 2 * unread(server) + buffered(server) + kernel_bytes(server)
        assert kept < MOST_BYTES


@pytest.mark.parametrize("kind", [*STREAMS, "whole"])
def test_how_long(server: Inside, kind: str) -> None:
    """Then its connection is cut, and all that was held for it is free."""
    stalled(server, {**STREAMS, "whole": WHOLE}[kind])
    eventually(lambda: buffered(server) > 0, "it takes no more")
    with patience(server, 0.2):
        server.within(lambda: [c.start_deadline() for c in connections(server)])
        eventually(server.is_free, "its rows are gone")
        eventually(lambda: not connections(server), "and its connection")


def test_who_reads_late_is_told_everything(server: Inside) -> None:
    client = stalled(server, STREAMS["chat"])
    eventually(lambda: is_full(server), "its rows are held")
    assert "".join(pieces(client)) == SAID["Long"]


def test_rows_that_another_server_computes_are_held_there(
    server: Inside, settings: Settings
) -> None:
    """And they go on here once it does no more."""
    first = stalled(server, STREAMS["chat"])
    eventually(lambda: is_full(server), "its rows are held")
    tasks: list[asyncio.Task[None]] = []  # which the loop itself would forget
    with serving(settings) as new:
        ours, theirs = socket.socketpair()
        relay = RowRelay(new.pool, theirs)
        new.within(lambda: tasks.append(asyncio.create_task(relay.serve())))
        server.within(lambda: tasks.append(asyncio.create_task(server.pool.hand_over(ours))))
        assert "".join(pieces(first)) == SAID["Long"]
        leaves, late = stalled(server, STREAMS["chat"]), stalled(server, STREAMS["chat"])
        eventually(lambda: held(server) == held(new) == 2, "its rows are held")
        assert "".join(read(server, chat("Short"))) == SAID["Short"]
        assert held(server) == held(new) == 2
        reset(leaves)
        eventually(lambda: new.given() == 1, "a row is gone")
        new.within(tasks[0].cancel)
    assert "".join(pieces(late)) == SAID["Long"]


def test_rows_that_are_held_now_and_then_answer_as_alone(tiny_path: Path) -> None:
    asks = [
        ask(row, prompt=5 + row, tokens=30, sampling=MIXED[row], grammar=[None, *GRAMMARS][row % 4])
        for row in range(8)
    ]
    alone = [ids(tokens_of(each.row, run(loaded(tiny_path), each))) for each in asks]
    engine, dice = loaded(tiny_path, concurrency=5), random.Random(1)
    reports: list[Report] = [report for each in asks for report in engine.handle(each)]
    while len(of_ended(reports)) < len(asks):
        victim = dice.randrange(8)
        engine.handle(PauseRows([victim]) if dice.random() < 0.3 else UnpauseRows([victim]))
        reports += engine.step()
    assert not failures(reports)
    assert [ids(tokens_of(row, reports)) for row in range(8)] == alone


def of_ended(reports: list[Report]) -> set[int]:
    tokens = (token for step in of(StepOutput, reports) for token in step.tokens)
    return {token.row for token in tokens if token.finish}


def unread(server: Inside) -> int:
    return server.within(
        lambda: sum(a.unread for a in {*server.pool.engines[0].engine.row_streams.values()})
    )


def kernel_bytes(server: Inside) -> int:
    found = [c.transport.get_extra_info("socket") for c in connections(server)]
    return sum(s.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for s in found)


def read(server: Inside, sent: bytes) -> list[str]:
    """The pieces of text of a stream."""
    client = server.connect()
    client.sendall(sent)
    return pieces(client)


def pieces(client: socket.socket) -> list[str]:
    found: list[str] = []
    with client, client.makefile("rb") as stream:
        for line in stream:
            if line.startswith(b"data: [DONE]"):
                return found
            if line.startswith(b"data: "):
                choice = json.loads(line.removeprefix(b"data: "))["choices"][0]
                found.append(choice["delta"].get("content") or "")
    raise AssertionError("it broke off")
