"""An upstream that fails or attacks costs its own request an error, and no other one anything."""

import gzip
import json
import socket
import sys
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.upstream.connection import (
    FAILURES,
    FIRST_PAUSE,
    MOST_CLIENTS,
    CircuitBreaker,
    UpstreamBreaker,
)
from mlx_server.upstream.failures import FIRST_PAUSE as FIRST_RETRY
from mlx_server.upstream.failures import redacted
from tests.api.leaving import Leaver
from tests.clocks import Clock
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
    events,
    gateway,
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


@pytest.mark.parametrize("failure", [whole({}, 503), whole({}, 429), Reply(breaks=True)])
def test_it_is_asked_again_before_the_answer_begins(
    failure: Reply, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(failure, failure, says("Yes"))
    assert answered(client, model="patient")["choices"][0]["message"]["content"] == "Yes"
    assert len(upstream.asked) == 3


def test_it_is_not_asked_again_once_the_answer_has_begun(
    client: TestClient, upstream: PlayingServer
) -> None:
    begun = Reply((sse(delta(content="Ye"), done=False),), breaks=True)
    upstream.plays(begun, says("Yes"))
    response = chat(client, model="patient", stream=True)
    assert response.status_code == 200
    *_, last = events(response.text)
    assert "lost the connection" in last["error"]["message"]
    assert len(upstream.asked) == 1


def test_a_pause_that_is_asked_for(
    client: TestClient, upstream: PlayingServer, pauses: list[float]
) -> None:
    upstream.plays(whole({}, 503), whole({}, 429, **{"retry-after": "20"}), says("Yes"))
    answered(client, model="patient")
    assert pauses[0] <= FIRST_RETRY
    assert pauses[1:] == [20]
    too_long = str(limits.UPSTREAM_PAUSE_SECONDS + 1)
    upstream.plays(whole({}, 429, **{"retry-after": too_long}), says("Yes"))
    error_of(client, 503, model="patient")
    assert len(upstream.asked) == 1


def test_so_many_attempts(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(whole({}, 500))
    error_of(client, 502, model="patient")
    assert len(upstream.asked) == 1 + limits.UPSTREAM_RETRIES == 3


def test_a_server_that_is_not_there(client: TestClient) -> None:
    error = error_of(client, 502, model="gone")
    assert "can't be reached" in error["message"]
    assert "127.0.0.1" not in error["message"]


@pytest.mark.skipif(sys.platform == "darwin", reason="its kernel takes connections nevertheless")
def test_a_connection_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UPSTREAM_CONNECT_SECONDS", 0.1)
    with ExitStack() as on:
        full = on.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            waiting = on.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        client = on.enter_context(gateway(url, {"up": {}}))
        error = error_of(client, 504)
        assert error["code"] == "upstream_timeout"
        assert "took no connection" in error["message"]


def test_silence_before_and_within_an_answer(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(Reply(hangs=True))
    assert error_of(client, 504, model="hasty")["code"] == "upstream_timeout"
    upstream.plays(Reply((sse(delta(content="Ye"), done=False),), hangs=True))
    *_, last = events(chat(client, model="hasty", stream=True).text)
    assert last["error"]["code"] == "upstream_timeout"
    assert upstream.left.wait(5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        delta(),
        delta(content=""),
        {"choices": [], "usage": {"completion_tokens": 1}},
        {"choices": [{"index": 1, "delta": {"content": "of another answer"}}]},
        delta(tool_calls=[{"index": 0, "id": "call", "function": {"name": "f"}}]),
    ],
    ids=str,
)
def test_what_adds_nothing_does_not_keep_an_answer_open(
    sent: Any, client: TestClient, upstream: PlayingServer
) -> None:
    begun = delta(tool_calls=[{"index": 0, "id": "call", "function": {"name": "f"}}])
    first = sse(delta(content="Ye"), begun, done=False)
    upstream.plays(Reply((first, sse(sent, done=False)), endless=True))
    *_, last = events(chat(client, model="hasty", stream=True).text)
    assert last["error"]["code"] == "upstream_timeout"
    assert "added nothing" in last["error"]["message"]
    assert upstream.left.wait(5)


def test_after_the_end_the_usage_is_waited_for_once(
    client: TestClient, upstream: PlayingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_server.upstream.connection.USAGE_SECONDS", 0.2)
    ended = sse(delta(content="Yes"), delta("stop"), done=False)
    upstream.plays(Reply((ended, sse(delta(), done=False)), endless=True))
    assert answered(client)["choices"][0]["message"]["content"] == "Yes"
    assert upstream.left.wait(5)


def test_an_answer_without_end_in_time(
    upstream: PlayingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UPSTREAM_ANSWER_SECONDS", 0.5)
    upstream.plays(Reply((sse(delta(content="x"), done=False),), endless=True))
    with gateway(upstream.url, {"up": {}}) as client:
        *_, last = events(chat(client, stream=True).text)
        assert last["error"]["code"] == "upstream_timeout"
        assert "within 0.5 seconds" in last["error"]["message"]
        assert upstream.left.wait(5)


@pytest.mark.parametrize(
    ("what", "reply"),
    {
        "lists and objects": Reply((b"data: [" + b"[]," * 70_000 + b"[]]\n\n",)),
        "strings": whole(["a"] * 300_000),
        "numbers": Reply((b"data: [" + b"0," * 300_000 + b"0]\n\n",)),
        "long numbers": Reply((b'data: {"choices": ' + b"1" * 401 + b"}\n\n",)),
    }.items(),
)
def test_a_value_with_too_much(
    what: str, reply: Reply, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(reply)
    message = error_of(client, 502)["message"]
    assert "JSON that is too large" in message
    assert what in message


def test_the_breaker_opens_and_others_are_served(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(whole({}, 500))
    for _ in range(5):
        error_of(client, 502)
    upstream.plays(says("Yes"))
    assert "several times in a row" in error_of(client, 503)["message"]
    assert not upstream.asked
    answered(client, model="patient")
    states = {each["id"]: each["state"] for each in client.get("/v1/pool").json()["models"]}
    assert (states["up"], states["patient"]) == ("unavailable", "ready")


def another(client: TestClient) -> TestClient:
    """A client of the same server, with another address."""
    other = TestClient(client.app, "http://localhost", client=("198.51.100.7", 1))
    other.portal = client.portal
    return other


def test_one_clients_failures_are_its_own(client: TestClient, upstream: PlayingServer) -> None:
    other = another(client)
    upstream.plays(whole({}, 500))
    for _ in range(5):
        error_of(client, 502)
    upstream.plays(says("Yes"))
    error_of(client, 503)
    answered(other)


def test_an_upstream_that_takes_no_connection_is_left_alone_by_all(client: TestClient) -> None:
    other = another(client)
    for _ in range(5):
        error_of(client, 502, model="gone")
    assert "several times in a row" in error_of(other, 503, model="gone")["message"]


def test_a_loop_of_servers_ends(client: TestClient, upstream: PlayingServer) -> None:
    hops, most = "x-mlx-server-hops", limits.UPSTREAM_HOPS
    for sent, passed_on in [({}, 1), ({hops: str(most - 1)}, most), ({hops: "-1"}, 1)]:
        upstream.plays(says("Yes"))
        client.headers.update(sent)
        answered(client)
        assert upstream.asked[0].headers[hops] == str(passed_on)
        client.headers.pop(hops, None)
    upstream.plays(says("Yes"))
    client.headers[hops] = str(most)
    try:
        error = error_of(client, 508)
    finally:
        del client.headers[hops]
    assert (error["code"], upstream.asked) == ("upstream_loop", [])
    assert "source" in error["message"]
    upstream.plays(whole({"error": {"message": error["message"]}}, 508))
    assert error_of(client, 508, model="patient")["code"] == "upstream_loop"
    assert len(upstream.asked) == 1


def test_a_stop_string_ends_the_upstreams_work(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(Reply((sse(delta(content="No end. "), done=False),), endless=True))
    body = {"model": "up", "stream": True, "stop": ["end. No"]}
    message = {"role": "user", "content": "hi"}
    response = client.post("/v1/chat/completions", json={**body, "messages": [message]})
    assert "[DONE]" in response.text
    assert upstream.left.wait(5)


def test_a_client_that_leaves_frees_the_upstream(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(Reply((sse(delta(content="No end. "), done=False),), hangs=True))
    messages = [{"role": "user", "content": "hi"}]
    leaver = Leaver({"model": "up", "stream": True, "messages": messages})
    assert client.portal
    client.portal.call(client.app, leaver.scope, leaver.receive, leaver.send)
    assert leaver.sent[0]["status"] == 200
    assert upstream.left.wait(5)


def test_a_redirect_is_not_followed(client: TestClient, upstream: PlayingServer) -> None:
    for status in (301, 302, 307, 308):
        upstream.plays(Reply(status=status, headers={"location": f"{upstream.url}/elsewhere"}))
        assert "redirect" in error_of(client, 502)["message"]
        assert len(upstream.asked) == 1


TEXT = sse(delta(content="x" * 100), done=False)
DETAILS = sse(delta(reasoning_details=[{"type": "a"}, {"type": "b"}]), done=False)


@pytest.mark.parametrize(
    ("name", "sent", "what"),
    [
        ("UPSTREAM_MEMORY", TEXT, "too many bytes"),
        ("UPSTREAM_CHARACTERS", TEXT, "an answer that is too long"),
        ("UPSTREAM_LINE_BYTES", b"x" * 1000, "an event that is too long"),
        ("UPSTREAM_EXTRA_BYTES", DETAILS, "too much to be sent back"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answer_without_end(
    name: str,
    sent: bytes,
    what: str,
    client: TestClient,
    upstream: PlayingServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, name, 10_000)
    upstream.plays(Reply((sent,), endless=True))
    response = chat(client, stream=True)
    assert what in response.text
    assert upstream.left.wait(5)


def test_a_body_without_end(
    client: TestClient, upstream: PlayingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UPSTREAM_LINE_BYTES", 10_000)
    upstream.plays(
        Reply((b" " * 1000,), headers={"content-type": "application/json"}, endless=True)
    )
    assert "too long" in error_of(client, 502)["message"]
    monkeypatch.setattr(limits, "UPSTREAM_ERROR_BYTES", 10_000)
    upstream.plays(Reply((b" " * 1000,), 500, endless=True))
    error_of(client, 502)
    assert upstream.left.wait(5)


def test_more_requests_than_connections(
    client: TestClient, upstream: PlayingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UPSTREAM_CONNECTIONS", 1)
    upstream.plays(Reply((sse(delta(content="Yes"), done=False),), hangs=True))
    response = chat(client, model="hasty", n=2)
    assert response.status_code in (503, 504), response.text


def failing(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.begin()
        breaker.failed()


def test_one_probe_at_a_time_decides() -> None:
    breaker = CircuitBreaker(clock := Clock())
    failing(breaker, FAILURES)
    clock.now += FIRST_PAUSE
    assert breaker.seconds_left() == 0
    breaker.begin()
    assert breaker.seconds_left() > 0
    breaker.failed()
    assert breaker.seconds_left() == 2 * FIRST_PAUSE
    clock.now += 2 * FIRST_PAUSE
    breaker.begin()
    breaker.abandoned()
    assert breaker.seconds_left() == 0
    breaker.begin()
    breaker.succeeded()
    assert not breaker.is_open
    failing(breaker, FAILURES)
    assert breaker.seconds_left() == FIRST_PAUSE


def test_a_failure_that_began_before_does_not_lengthen_the_pause() -> None:
    breaker = CircuitBreaker(Clock())
    for each in (breaker.begin, breaker.failed):
        for _ in range(FAILURES + 3):
            each()
    assert breaker.seconds_left() == FIRST_PAUSE


def test_few_clients_are_remembered() -> None:
    breaker = UpstreamBreaker(Clock())
    for _ in range(FAILURES):
        breaker.failed("first")
    for number in range(MOST_CLIENTS):
        breaker.failed(f"{number}")
    assert breaker.seconds_left("first") == 0
