"""The server's own lines, errors that no request is about, and what it waits for when it stops."""

import asyncio
import errno
import json
import logging
import shlex
from itertools import count
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import pytest
from uvicorn.server import ServerState

from mlx_server.http import server, sse
from mlx_server.http.server import LoopErrors, _to_try, let_last_words_out
from mlx_server.http.sse import Chunks, EventStream, Frames
from mlx_server.pool.prepare import Task

URL = "http://[::1]:9000"


def to_try(id: str, task: Task, url: str = URL) -> list[str]:
    """The words of the command as a shell reads them."""
    model: Any = SimpleNamespace(id=id, task=task)
    return shlex.split(_to_try(model, url))


@pytest.mark.parametrize("id", ["m", "my model", "it's", "$(reboot)", "a; b", "Salü 🙂"])
@pytest.mark.parametrize("task", get_args(Task))
def test_the_command_to_try_names_the_model_in_a_shell(id: str, task: Task) -> None:
    words = to_try(id, task)
    if task == "generate":
        assert words == ["mlx-server", "chat", id, "--url", URL]
    else:
        assert words[:3] == ["curl", f"{URL}/v1/{words[1].rpartition('/')[2]}", "--json"]
        assert json.loads(words[3])["model"] == id


def test_connections_that_can_not_be_taken_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    loop, unheard = asyncio.new_event_loop(), LoopErrors()
    for _ in range(100):
        unheard(loop, {"exception": OSError(errno.EMFILE, "Too many open files")})
    unheard(loop, {"exception": ValueError("a word")})
    loop.close()
    taken, other = caplog.records
    assert taken.getMessage() == "new connections can't be accepted for now: Too many open files"
    assert other.levelno == logging.ERROR


def test_comments_have_their_place_among_events_and_do_not_pile_up_for_a_slow_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients of responses count both."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.0)
    numbers = count()
    sent: list[bytes] = []

    async def run() -> set[asyncio.Task[Any]]:
        reads = asyncio.Event()

        async def chunks() -> Chunks:
            for turns in range(9):
                yield {"number": next(numbers)}
                for _ in range(turns % 3):
                    await asyncio.sleep(0)

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if "body" in message:
                await reads.wait()
                sent.append(message["body"])

        frames = Frames(
            keep_alive=lambda: b"%d" % next(numbers), encode=lambda chunk: b"%d" % chunk["number"]
        )
        answer = chunks()
        stream = EventStream(answer, {}, source=answer, frames=frames)({}, receive, send)
        streaming = asyncio.create_task(stream)
        for _ in range(100):
            await asyncio.sleep(0)
        assert next(numbers) == 1, "nothing is made while the first event waits"
        reads.set()
        await streaming
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert not asyncio.run(run())
    *events, end = sent
    assert end == sse.DONE
    assert [int(event) for event in events] == [0, *range(2, next(numbers))]
    assert len(events) > 9, "comments came between them"


HANG = 20.0


@pytest.mark.parametrize(
    ("unread", "ends", "working_seconds", "is_waited_for"),
    [([0], True, HANG, True), ([9, 0], False, 3600.0, False), ([0], False, 0.1, False)],
    ids=["it is still being stored", "its client does not read", "it does not end"],
)
def test_an_answer_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    unread: list[int],
    ends: bool,
    working_seconds: float,
    is_waited_for: bool,
) -> None:
    monkeypatch.setattr(server, "WORKING_SECONDS", working_seconds)
    monkeypatch.setattr(server, "UNREAD_SECONDS", 0.05)

    async def run() -> bool:
        state, ended = ServerState(), asyncio.Event()
        write_buffer = "transport.get_write_buffer_size.return_value"
        connections: Any = {Mock(**{write_buffer: size}) for size in unread}
        state.connections = connections
        answer: asyncio.Task[Any] = asyncio.create_task(ended.wait())
        answer.add_done_callback(state.tasks.discard)
        state.tasks.add(answer)
        if ends:
            asyncio.get_running_loop().call_later(0.3, ended.set)
        await asyncio.wait_for(let_last_words_out(state), HANG)
        return answer.done()

    assert asyncio.run(run()) == is_waited_for
