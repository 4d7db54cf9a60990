"""Clients that leave before their answer has ended."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import openai
import pytest
from openai import OpenAI, Stream
from openai.types.chat import (
    ChatCompletionChunk,
)

from tests.live.chats import ENDLESS, STORY, ask, ask_streaming
from tests.live.server import SHALLOW, LiveServer, eventually


@contextmanager
def endless(client: OpenAI, **asked: Any) -> Iterator[Stream[ChatCompletionChunk]]:
    with closing(
        ask_streaming(client, model=SHALLOW, messages=STORY, **ENDLESS, **asked)
    ) as stream:
        next(stream)
        yield stream


@contextmanager
def endless_unstreamed(server: LiveServer, **asked: Any) -> Iterator[None]:
    """By hand, since the SDK can't leave a request that it waits for."""
    body = {"model": SHALLOW, "messages": STORY, **ENDLESS, **asked}
    raw = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + raw)
        yield


def batch_of(server: LiveServer, size: int) -> Callable[[], bool]:
    return lambda: server.gauge("mlx_server_batch_size") == size


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_rows(
    server: LiveServer, client: OpenAI, stream: bool, n: int
) -> None:
    eventually(server.idle, "the engine is idle before")
    with ExitStack() as stack:
        # As long as this one runs, it is the engine that tells how many rows it has.
        stack.enter_context(endless(client))
        leaving = endless(client, n=n) if stream else endless_unstreamed(server, n=n)
        with leaving:
            eventually(batch_of(server, 1 + n), "all rows run")
        eventually(batch_of(server, 1), "the rows are gone")
    eventually(server.idle, "the engine is idle afterwards")


def test_a_client_that_runs_out_of_patience_frees_its_row(
    server: LiveServer, client: OpenAI
) -> None:
    with pytest.raises(openai.APITimeoutError):
        ask(client.with_options(timeout=0.5), model=SHALLOW, messages=STORY, **ENDLESS)
    eventually(server.idle, "the row is gone")
