"""`store: false` keeps a request off the prompt cache's disk, on each endpoint that knows it."""

from collections.abc import Callable
from typing import Any

import pytest

from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.chat_completions.input import to_request as of_chat
from mlx_server.api.completions import CompletionBody
from mlx_server.api.completions import to_request as of_completions
from mlx_server.api.messages.input import to_request as of_messages
from mlx_server.api.messages.protocol import MessagesBody
from mlx_server.api.native import NativeBody
from mlx_server.api.native import to_request as of_native
from mlx_server.api.ollama.input import GenerateBody, generate_request
from mlx_server.api.responses import input as responses
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.families import family_named
from mlx_server.http.security import Signer
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
    items = responses.input_items(body, nothing.__getitem__)
    return responses.to_request(body, items, opened=nothing.get).request


def messages(own: dict[str, Any]) -> GenerateRequest:
    given = [{"role": "user", "content": "x"}]
    body = MessagesBody.model_validate({"model": "m", "max_tokens": 1, "messages": given, **own})
    return of_messages(body, Signer(b"x" * 32)).request


def native(own: dict[str, Any]) -> GenerateRequest:
    given = [{"role": "user", "content": "x"}]
    body = NativeBody.model_validate({"model": "m", "messages": given, **own})
    return of_native(body, "m", family_named("plain"))


def ollama(own: dict[str, Any]) -> GenerateRequest:
    body = GenerateBody.model_validate({"model": "m", "prompt": "x", "options": own})
    return generate_request(body, "m")


@pytest.mark.parametrize("read", [chat, completions, response, messages, native, ollama])
@pytest.mark.parametrize("store", [None, True, False])
def test_which_requests_may_be_written(read: Read, store: bool | None) -> None:
    assert read({}).on_disk
    assert read({"store": store}).on_disk is (store is not False)
