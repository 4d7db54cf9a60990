"""What a stopping server waits for before it cuts its connections."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from uvicorn.server import ServerState

from mlx_server.http import server
from mlx_server.http.server import let_last_words_out

HANG = 20.0


def connection(unread: int) -> Any:
    return Mock(**{"transport.get_write_buffer_size.return_value": unread})


def answering(state: ServerState, ends: asyncio.Event) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.create_task(ends.wait())
    task.add_done_callback(state.tasks.discard)
    state.tasks.add(task)
    return task


def test_answers_that_are_still_being_stored_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "WORKING_SECONDS", HANG)
    monkeypatch.setattr(server, "UNREAD_SECONDS", 0.05)

    async def run() -> bool:
        state, ends = ServerState(), asyncio.Event()
        state.connections = {connection(0)}
        answer = answering(state, ends)
        asyncio.get_running_loop().call_later(0.3, ends.set)
        await asyncio.wait_for(let_last_words_out(state), HANG)
        return answer.done()

    assert asyncio.run(run())


def test_a_client_that_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WORKING_SECONDS", 3600.0)

    async def run() -> bool:
        state = ServerState()
        state.connections = {connection(9), connection(0)}
        answer = answering(state, asyncio.Event())
        await asyncio.wait_for(let_last_words_out(state), HANG)
        return answer.done()

    assert not asyncio.run(run())


def test_an_answer_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WORKING_SECONDS", 0.1)

    async def run() -> bool:
        state = ServerState()
        state.connections = {connection(0)}
        answer = answering(state, asyncio.Event())
        await asyncio.wait_for(let_last_words_out(state), HANG)
        return answer.done()

    assert not asyncio.run(run())
