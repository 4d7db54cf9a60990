"""The server's own lines: what it announces, and errors that no request is about."""

import asyncio
import errno
import json
import logging
import shlex
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from mlx_server.http.server import LoopErrors, _to_try
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
