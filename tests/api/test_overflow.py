"""What a prompt that exceeds the context is answered with, on each of OpenAI's endpoints."""

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.api import wire
from tests.api.wire import Json

CONTEXT = 2048
LONG = [{"role": "user", "content": "hi " * 2000}]
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": LONG},
    "/v1/completions": {"prompt": "hi " * 2000},
    "/v1/responses": {"input": LONG},
    "/generate": {"messages": LONG},
}

KNOWN_TO_CLIENTS = [
    r"this model's maximum context length is",  # litellm, and with it aider
    r"maximum context length is \d+ tokens",  # pi, opencode
]
IN_THE_WORDS_OF_AN_ENDPOINT = {
    "/v1/chat/completions": r"reduce the length of the messages",
    "/v1/responses": r"exceeds the context window",
    "/v1/completions": r"however you requested \d+ tokens",
}


def refused(client: TestClient, path: str, **asked: Any) -> Json:
    return wire.error(client.post(path, json={"model": wire.MODEL, **BODIES[path], **asked}))


def count(client: TestClient) -> int:
    body = {"model": wire.MODEL, "messages": LONG}
    tokens = wire.ok(client.post("/v1/messages/count_tokens", json=body))["input_tokens"]
    assert tokens > CONTEXT
    return int(tokens)


def test_messages_are_refused_in_openais_words(client: TestClient) -> None:
    assert refused(client, "/v1/chat/completions") == {
        "message": (
            f"This model's maximum context length is {CONTEXT} tokens. However, your messages "
            f"resulted in {count(client)} tokens. Please reduce the length of the messages."
        ),
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("pattern", KNOWN_TO_CLIENTS)
def test_clients_know_the_overflow_by_its_words(
    client: TestClient, path: str, pattern: str
) -> None:
    found = refused(client, path)
    assert found["code"] == "context_length_exceeded"
    assert re.search(pattern, found["message"], re.IGNORECASE)


@pytest.mark.parametrize(("path", "pattern"), IN_THE_WORDS_OF_AN_ENDPOINT.items())
def test_each_endpoint_has_its_own_words(client: TestClient, path: str, pattern: str) -> None:
    assert re.search(pattern, refused(client, path)["message"])


@pytest.mark.parametrize("path", ["/v1/responses", "/generate"])
def test_tokens_are_counted_exactly(client: TestClient, path: str) -> None:
    assert f"resulted in {count(client)} tokens" in refused(client, path)["message"]


def test_an_input_is_called_so(client: TestClient) -> None:
    assert refused(client, "/v1/responses")["param"] == "input"


@pytest.mark.parametrize("length", [CONTEXT, 3000, 5000])
def test_the_longest_of_several_prompts_is_counted(client: TestClient, length: int) -> None:
    prompts = [[1] * 10, [1] * length, [1] * CONTEXT]
    found = refused(client, "/v1/completions", prompt=prompts, max_tokens=100)
    assert found["param"] == "prompt"
    assert f"requested {length + 100} tokens ({length} in your prompt; 100 for" in found["message"]


@pytest.mark.slow
def test_an_overflow_that_is_too_long_to_count_has_the_same_words(client: TestClient) -> None:
    long = [{"role": "user", "content": "hi " * 400_000}]
    message = refused(client, "/v1/chat/completions", messages=long)["message"]
    found = re.search(rf"length is {CONTEXT} tokens.* resulted in (\d+) tokens", message)
    assert found
    assert int(found[1]) > CONTEXT
