"""IBM's watsonx: its body, its stream, and a token that is fetched for the key."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from mlx_server.system.http_transport import BoundedTransport
from mlx_server.upstream import connection as credentials
from mlx_server.upstream.connection import IamToken, UpstreamKey
from tests.clients.recorded import WEATHER as CLIENTS_WEATHER
from tests.clients.watsonx.exchanges import recorded
from tests.upstream.playing import (
    KEY,
    KEY_VARIABLE,
    PARIS,
    SSE,
    USAGE,
    WEATHER,
    PlayingServer,
    Reply,
    answered,
    call,
    chat,
    delta,
    gateway,
    in_one,
    whole,
)

PROJECT = "0e1f0000-0000-4000-8000-000000000000"


def token(text: str, lasts: float = 3600) -> Reply:
    return whole({"access_token": text, "expires_in": lasts, "token_type": "Bearer"})


def stream(*values: Any) -> Reply:
    """With ids and names of events, and no `[DONE]`."""
    lines = [
        f"id: {i}\nevent: message\ndata: {json.dumps(value)}\n\n" for i, value in enumerate(values)
    ]
    return Reply(("".join(lines).encode(),), headers=SSE)


YES = stream(delta(content="Yes"), delta("stop"), USAGE)


@pytest.fixture
def client(upstream: PlayingServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr(credentials, "IAM_URL", upstream.url)
    model: dict[str, Any] = {
        "source": f"watsonx:{upstream.url}",
        "upstream_model": "openai/gpt-oss-120b",
        "api_key_env": KEY_VARIABLE,
        "family": "gpt_oss",
    }
    models = {"up": {**model, "project_id": PROJECT}, "space": {**model, "space_id": PROJECT}}
    with gateway(upstream.url, models) as client:
        yield client


def test_one_token_serves_many_requests(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(token("first"), YES)
    for _ in range(2):
        assert in_one(client, {})["text"] == "Yes"
    iam, *chats = upstream.asked
    assert iam.path == "/identity/token"
    assert f"apikey={KEY}" in iam.raw.decode()
    assert {each.headers["authorization"] for each in chats} == {"Bearer first"}
    assert chats[0].path.startswith("/ml/v1/text/chat_stream?version=")
    assert chats[0].body == {
        "model_id": "openai/gpt-oss-120b",
        "project_id": PROJECT,
        "messages": [{"role": "user", "content": "hi"}],
    }


def test_the_key_is_sent_where_the_certificate_is_checked(
    client: TestClient, upstream: PlayingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports = list[dict[str, Any]]()

    def transport(**options: Any) -> BoundedTransport:
        transports.append(options)
        return BoundedTransport(**options)

    monkeypatch.setattr(credentials, "BoundedTransport", transport)
    upstream.plays(token("first"), YES)
    assert in_one(client, {})["text"] == "Yes"
    assert [options["verify"] for options in transports] == [True]


@pytest.mark.parametrize("text", ["a\r\nx: y", "é", "\ud83d\ude00"])
def test_a_token_that_is_no_header(client: TestClient, upstream: PlayingServer, text: str) -> None:
    upstream.plays(token(text), YES)
    response = chat(client)
    assert response.status_code == 502
    assert "sent no token" in response.text


def test_a_space_and_a_choice_of_tools(client: TestClient, upstream: PlayingServer) -> None:
    made = stream(delta(**call('{"city": "Paris"}')), delta("tool_calls"), USAGE)
    upstream.plays(token("first"), made)
    found = in_one(client, {"model": "space", "tools": [WEATHER], "tool_choice": "required"})
    assert found["calls"] == [PARIS]
    body = upstream.bodies_of("/ml/")[0]
    assert (body["space_id"], body["tool_choice_option"]) == (PROJECT, "required")
    assert "project_id" not in body


def test_a_token_that_is_refused_is_replaced_once(
    client: TestClient, upstream: PlayingServer
) -> None:
    refused = whole({"errors": [{"code": "authentication_token_expired", "message": "x"}]}, 401)
    upstream.plays(token("first"), refused, token("second"), YES)
    answered(client)
    assert upstream.asked[-1].headers["authorization"] == "Bearer second"
    upstream.plays(refused, token("third"), refused)
    error = chat(client).json()["error"]
    assert error["code"] == "upstream_failed"
    assert "api_key_env" in error["message"]
    assert len(upstream.asked) == 3


def test_no_secret_is_in_a_message(client: TestClient, upstream: PlayingServer) -> None:
    said = f"Project {PROJECT} of {KEY} with first-token-of-the-day"
    refused = whole({"errors": [{"message": said}]}, 400)
    upstream.plays(token("first-token-of-the-day"), refused)
    response = chat(client)
    assert response.status_code == 400
    for secret in (PROJECT, KEY, "first-token-of-the-day"):
        assert secret not in response.text


STATUSES = (400, 402, 413, 422, 429, 500, 503)
FORM = {"error": {"message": "apikey=a%2Fkey%2Bof%2Bours&grant_type=urn%3Aibm"}}


@pytest.mark.parametrize(
    "reply",
    [
        whole({}, 400),
        whole({}, 500),
        whole([]),
        whole({"a": 1}),
        *(whole(FORM, s) for s in STATUSES),
    ],
)
def test_no_token(reply: Reply, client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(reply)
    response = chat(client)
    assert response.status_code in (502, 503)
    for quoted in (KEY, "ours", "urn"):
        assert quoted not in response.text


def test_a_token_is_renewed_before_it_expires(upstream: PlayingServer) -> None:
    upstream.plays(token("first", 3600), token("second", 3600))
    now = [0.0]

    async def used() -> list[str]:
        found = []
        async with httpx2.AsyncClient(verify=False, trust_env=False) as http:
            key = UpstreamKey("KEY", {"KEY": KEY})
            iam = IamToken(key, upstream.url, lambda: http, lambda: now[0])
            for seconds in (0.0, 3000.0, 3301.0, 3301.0):
                now[0] = seconds
                found += [(await iam.headers())["authorization"] for _ in range(2)]
            # many requests at once fetch one token
            now[0] = 9000.0
            await asyncio.gather(*(iam.headers() for _ in range(5)))
        return found

    assert asyncio.run(used()) == ["Bearer first"] * 4 + ["Bearer second"] * 4
    assert len(upstream.asked) == 3


def test_a_request_is_what_ibms_own_client_sends(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(token("first"), stream(delta(**call('{"city": "Paris"}')), delta("stop")))
    said: Any = {"text": "What is the weather in Paris?", "tools": [CLIENTS_WEATHER]}
    chat(client, **said, tool_choice="required")
    (theirs,) = recorded()["a leaked call, streamed"]["raw_requests"]
    ours = upstream.asked[1]
    assert ours.path.partition("?")[0] == theirs["path"]
    owner = {"project_id": PROJECT, "tool_choice_option": "required"}
    assert ours.body == theirs["body"] | owner
