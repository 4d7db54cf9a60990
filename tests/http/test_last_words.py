"""What a stopping server waits for before it cuts its connections."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from uvicorn.server import ServerState

from mlx_server.http import server
from mlx_server.http.server import let_last_words_out

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
