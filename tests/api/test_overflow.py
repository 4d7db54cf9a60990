"""What a prompt that exceeds the context is answered with, on each of OpenAI's endpoints."""

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.api import wire
from tests.api.wire import Json

CONTEXT = 2048
LONG = [{"role": "user", "content": "hi " * 2000}]
ENDPOINTS: dict[str, tuple[Json, str]] = {
    "/v1/chat/completions": ({"messages": LONG}, "Please reduce the length of the messages."),
    "/v1/completions": ({"prompt": "hi " * 2000}, "however you requested"),
    "/v1/responses": ({"input": LONG}, "exceeds the context window"),
    "/generate": ({"messages": LONG}, "resulted in"),
}
"""Bodies, and words of the endpoint's own."""


def refused(client: TestClient, path: str, **asked: Any) -> Json:
    body = {"model": wire.MODEL, **ENDPOINTS[path][0], **asked}
    error = wire.error(client.post(path, json=body))
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    return error


@pytest.mark.parametrize("path", ENDPOINTS)
def test_clients_know_the_overflow_by_its_words(client: TestClient, path: str) -> None:
    counted = client.post("/v1/messages/count_tokens", json={"model": wire.MODEL, "messages": LONG})
    tokens = wire.ok(counted)["input_tokens"]
    body, words = ENDPOINTS[path]
    error = refused(client, path)
    message = error["message"]
    # litellm and aider, pi and opencode look for it
    assert f"his model's maximum context length is {CONTEXT} tokens" in message
    assert words in message
    assert "prompt" in body or f"resulted in {tokens} tokens" in message
    assert error["param"] in body


@pytest.mark.parametrize("length", [CONTEXT, 3000, 5000])
def test_the_longest_of_several_prompts_is_counted(client: TestClient, length: int) -> None:
    prompts = [[1] * 10, [1] * length, [1] * CONTEXT]
    found = refused(client, "/v1/completions", prompt=prompts, max_tokens=100)
    assert f"requested {length + 100} tokens ({length} in your prompt; 100 for" in found["message"]


@pytest.mark.slow
def test_an_overflow_that_is_too_long_to_count_has_the_same_words(client: TestClient) -> None:
    long = [{"role": "user", "content": "hi " * 400_000}]
    message = refused(client, "/v1/chat/completions", messages=long)["message"]
    found = re.search(rf"length is {CONTEXT} tokens.* resulted in (\d+) tokens", message)
    assert found
    assert int(found[1]) > CONTEXT
