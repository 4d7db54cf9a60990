"""An upstream that fails or attacks costs its own request an error, and no other one anything."""

import gzip
import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.upstream.failures import redacted
from tests.tables import cases
from tests.upstream.failing import WRONG, error_of
from tests.upstream.playing import (
    KEY,
    SSE,
    USAGE,
    Json,
    PlayingServer,
    Reply,
    answered,
    chat,
    delta,
    says,
    sse,
    streamed,
    whole,
)


@cases
def test_a_status(
    status: int, ours: int, code: str | None, client: TestClient, upstream: PlayingServer
) -> None:
    said = f"Wrong {KEY}, Bearer abc.def, org-1234567890, https://u:p@host/x, user a@b.de"
    upstream.plays(whole({"error": {"message": said, "user_id": "user_12345678"}}, status))
    error = error_of(client, ours)
    assert error["code"] == code
    for secret in (KEY, "abc.def", "org-1234567890", "u:p", "a@b.de", "user_12345678"):
        assert secret not in error["message"]


@cases
def test_what_shows_an_account_or_a_machine_is_redacted(secret: str) -> None:
    for text in (f"Wrong password: {secret}.", f'{{"token"="{secret}"}}', f"secret='{secret}'"):
        assert "ada" not in redacted(text)
        assert secret not in redacted(text)
    if "hunter" not in secret:
        assert secret not in redacted(f"It is at {secret} now")


@cases
def test_words_on_the_request_are_not_redacted(text: str) -> None:
    assert redacted(text) == text


def test_the_upstreams_words_on_the_request_are_passed_on(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(whole({"error": {"message": "`top_p` should be at most 1"}}, 400))
    assert "`top_p` should be at most 1" in error_of(client, 400)["message"]
    upstream.plays(whole({"detail": "the context length is 4096 tokens"}, 400))
    assert error_of(client, 400)["code"] == "context_length_exceeded"
    body = {"model": "up", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    error = client.post("/v1/messages", json=body).json()["error"]
    assert error["message"].startswith("prompt is too long: The upstream")


@cases
def test_an_error_by_another_name(
    status: int, words: str, sent: Json, client: TestClient, upstream: PlayingServer
) -> None:
    for reply in (whole(sent), streamed(sent), streamed(delta(content="Ye"), sent)):
        upstream.plays(reply)
        message = error_of(client, status)["message"]
        assert words in message
        assert "{" not in message


@cases
def test_a_prompt_that_is_too_long_in_other_words(
    said: str, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(whole({"error": {"message": said}}, 400))
    assert error_of(client, 400)["code"] == "context_length_exceeded"
    upstream.plays(whole({"error": {"message": "no", "code": "context_length_exceeded"}}, 400))
    assert error_of(client, 400)["code"] == "context_length_exceeded"


def test_a_key_that_is_not_set(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(says("Yes"))
    message = error_of(client, 502, model="keyless")["message"]
    assert "TEST_UPSTREAM_KEY_THAT_IS_NOT_SET" in message
    assert not upstream.asked


def test_the_key_is_sent_and_nothing_of_the_client(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("Yes"))
    body = {"model": "up", "messages": [{"role": "user", "content": "hi"}]}
    client.post(
        "/v1/chat/completions",
        json=body,
        headers={"authorization": "Bearer theirs", "cookie": "a=b", "x-request-id": "mine"},
    )
    (asked,) = upstream.asked
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert not {"cookie", "x-request-id"} & asked.headers.keys()
    assert asked.headers["accept-encoding"] == "identity"


def test_words_that_may_quote_a_prompt_are_told_to_its_client_alone(
    client: TestClient, upstream: PlayingServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    upstream.plays(whole({"error": {"message": "can't say 'the secret plan'"}}, 500))
    assert "the secret plan" in error_of(client, 502, model="patient")["message"]
    assert "trying again" in caplog.text
    assert "the secret plan" not in caplog.text
    shown = {each["id"]: each["error"] for each in client.get("/v1/pool").json()["models"]}
    assert shown["patient"] == "The last request failed: upstream_failed."


def test_the_first_fallback_that_answers(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(says("Yes"))
    found = answered(client, model="safe")
    assert (found["model"], found["choices"][0]["message"]["content"]) == ("up", "Yes")
    error_of(client, 502, model="unsafe")


def test_a_request_that_is_wrong_has_no_fallback(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("Yes"))
    assert error_of(client, 404, model="safe", adapter="a")["param"] == "adapter"
    assert not upstream.asked


HOSTILE = {
    "no valid JSON": Reply((b"data: {\n\n",)),
    "sent no answer": Reply((b"<html>",)),
    "sent no answer.": Reply(),
    "not UTF-8": Reply((b'data: {"choices": "\xff"}\n\n',)),
    "nested deeper than 64 levels": Reply((b"data: " + b"[" * 100_000 + b"\n\n",)),
    "compressed data": Reply(
        (gzip.compress(sse(delta("stop"))),), headers={**SSE, "content-encoding": "gzip"}
    ),
    "before the answer was complete": Reply((sse(delta(content="Yes"), done=False),)),
    "answer was complete": streamed(USAGE),
}


@pytest.mark.parametrize(("what", "reply"), HOSTILE.items(), ids=HOSTILE)
def test_what_is_no_answer(
    what: str, reply: Reply, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(reply)
    error = error_of(client, 502)
    assert error["code"] == "upstream_failed"
    assert what in error["message"]
    upstream.plays(says("Yes"))
    assert answered(client)["choices"][0]["message"]["content"] == "Yes"


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=json.dumps)
def test_wrong_types_everywhere(wrong: Any, client: TestClient, upstream: PlayingServer) -> None:
    """Each is read as far as it can be, or is the request's own error; never ours."""
    call = {"index": wrong, "id": wrong, "function": {"name": wrong, "arguments": wrong}}
    for said in (
        wrong,
        {"choices": wrong},
        {"choices": [wrong]},
        {"choices": [{"delta": wrong, "finish_reason": wrong}]},
        {"choices": [{"message": wrong}]},
        delta(content=wrong, reasoning=wrong, reasoning_details=wrong),
        delta(content=[wrong], reasoning_details=[wrong]),
        delta(tool_calls=wrong),
        delta(tool_calls=[wrong]),
        delta(tool_calls=[call]),
        delta(function_call=wrong),
        {"choices": [], "usage": wrong},
        {"choices": [], "usage": {"prompt_tokens": wrong, "prompt_tokens_details": wrong}},
        {"error": wrong},
    ):
        upstream.plays(streamed(said, delta(content="Yes"), delta("stop")))
        response = chat(client, model="patient")
        assert response.status_code in (200, 502), (said, response.text)
        assert "unexpected" not in response.text, (said, response.text)
    assert client.get("/health").status_code == 200


def test_calls_without_end(
    client: TestClient, upstream: PlayingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UPSTREAM_CALLS", 10)
    made = [{"index": i, "id": f"c{i}", "function": {"name": "f"}} for i in range(11)]
    upstream.plays(streamed(delta(tool_calls=made), delta("tool_calls")))
    assert "more calls" in error_of(client, 502)["message"]
