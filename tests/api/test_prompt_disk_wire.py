"""`store: false` keeps a request off the prompt cache's disk, on each endpoint that knows it."""

from collections.abc import Callable
from typing import Any

import pytest

from mlx_server.api.chat_completions.input import to_request as of_chat
from mlx_server.api.chat_completions.protocol import ChatBody
from mlx_server.api.completions.input import to_request as of_completions
from mlx_server.api.completions.protocol import CompletionBody
from mlx_server.api.responses import input as responses
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.requests import GenerateRequest

Read = Callable[[dict[str, Any]], GenerateRequest]


def chat(own: dict[str, Any]) -> GenerateRequest:
    messages = [{"role": "user", "content": "x"}]
    return of_chat(ChatBody.model_validate({"model": "m", "messages": messages, **own}))


def completions(own: dict[str, Any]) -> GenerateRequest:
    return of_completions(CompletionBody.model_validate({"model": "m", "prompt": "x", **own}))


def response(own: dict[str, Any]) -> GenerateRequest:
    nothing: dict[str, Any] = {}
    body = ResponsesBody.model_validate({"model": "m", "input": "x", **own})
    return responses.to_request(body, responses.input_items(body, nothing.__getitem__)).request


@pytest.mark.parametrize("read", [chat, completions, response])
@pytest.mark.parametrize("store", [None, True, False])
def test_which_requests_may_be_written(read: Read, store: bool | None) -> None:
    assert read({}).on_disk
    assert read({"store": store}).on_disk is (store is not False)
