"""What endpoints do around an answer, with a model that another server has: tools of MCP servers,
responses that go on, and /generate."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.app import create_app
from mlx_server.config.settings import Settings, StoreSettings, validated
from tests.upstream.playing import (
    CALL_JSON,
    PARIS,
    USAGE,
    Json,
    PlayingServer,
    Reply,
    delta,
    events,
    says,
    settings,
    streamed,
)
from tests.upstream.test_reasoning_details import SIGNED

HOSTILE = str(Path(__file__).parents[1] / "mcp" / "hostile.py")
EYE = {"type": "mcp", "server_label": "eye", "connector_id": "quiet", "require_approval": "never"}
LOOK = '{"name": "look", "arguments": {}}'
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(upstream: PlayingServer, tmp_path: Path) -> Iterator[TestClient]:
    made = settings(upstream.url, {"up": {"family": "qwen3"}})
    quiet: Any = {"quiet": {"command": sys.executable, "args": (HOSTILE, "quiet")}}
    whole = validated(
        Settings,
        {"models": made.models, "connectors": quiet, "store": StoreSettings(data_dir=tmp_path)},
    )
    app = create_app(whole)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


def called(name: str, arguments: str, **more: Any) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": 0, "id": "call_1", "function": function, **more}]}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "call", [called("look", "{}"), {"content": f"<tool_call>\n{LOOK}\n</tool_call>"}]
)
def test_a_tool_of_an_mcp_server_is_run_and_the_upstream_gets_its_result(
    call: Json, stream: bool, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(streamed(delta(**call), delta("tool_calls"), USAGE), says("I have seen it."))
    body = {"model": "up", "input": "Look!", "tools": [EYE], "stream": stream}
    response = client.post("/v1/responses", json=body)
    found = list(events(response.text))[-1]["response"] if stream else response.json()
    listed, made, message = found["output"]
    assert [tool["name"] for tool in listed["tools"]] == ["look"]
    assert (made["type"], made["output"], made["error"]) == ("mcp_call", "seen", None)
    assert message["content"][0]["text"] == "I have seen it."
    assert found["usage"]["input_tokens"] == 2 * USAGE["usage"]["prompt_tokens"]
    first, second = upstream.bodies
    assert [tool["function"]["name"] for tool in first["tools"]] == ["look"]
    *_, asked, result = second["messages"]
    assert asked["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert (result["role"], result["content"]) == ("tool", "seen")


def signed_look() -> Reply:
    call = called("look", "{}", extra_content=SIGNED)
    return streamed(delta(**call), delta("tool_calls"), USAGE)


def calls_sent(upstream: PlayingServer, request: int) -> list[Json]:
    messages = upstream.bodies[request]["messages"]
    return [call for each in messages for call in each.get("tool_calls") or ()]


def test_what_an_upstream_needs_back_comes_with_the_result_of_a_server(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(signed_look(), says("I have seen it."))
    body = {"model": "up", "input": "Look!", "tools": [EYE]}
    found = client.post("/v1/responses", json=body).json()
    (call,) = calls_sent(upstream, request=1)
    assert call["extra_content"] == found["output"][1]["extra_content"] == SIGNED


@pytest.mark.slow
@pytest.mark.parametrize("approve", [True, False])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("goes_on", [True, False], ids=["goes on", "approval alone"])
def test_it_waits_with_the_call_for_an_approval(
    approve: bool, kept: bool, goes_on: bool, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(signed_look(), says("Well."))
    tools = [{**EYE, "require_approval": "always"}]
    asked: list[Json] = [{"role": "user", "content": "Look!"}]
    body: Json = {"model": "up", "input": asked, "tools": tools, "store": kept}
    first = client.post("/v1/responses", json=body).json()
    wanted = first["output"][-1]
    assert (wanted["type"], wanted["extra_content"]) == ("mcp_approval_request", SIGNED)
    reply: Json = {"type": "mcp_approval_response", "approval_request_id": wanted["id"]}
    new = [{**reply, "approve": approve}, *(HI if goes_on else ())]
    if kept:
        body |= {"input": new, "previous_response_id": first["id"]}
    else:
        body["input"] = [*asked, *first["output"], *new]
    second = client.post("/v1/responses", json=body).json()
    assert second["status"] == "completed", second
    (call,) = calls_sent(upstream, request=1)
    assert call["extra_content"] == SIGNED
    for item in second["output"]:
        assert item["type"] != "mcp_call" or item["extra_content"] == SIGNED


def test_a_response_goes_on_where_another_ended(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("One."), says("Two."))
    first = client.post("/v1/responses", json={"model": "up", "input": "Begin."}).json()
    body = {"model": "up", "input": "Go on.", "previous_response_id": first["id"]}
    assert client.post("/v1/responses", json=body).json()["status"] == "completed"
    told = [(each["role"], each["content"]) for each in upstream.bodies[1]["messages"]]
    assert told == [("user", "Begin."), ("assistant", "One."), ("user", "Go on.")]


def test_generate_has_thoughts_calls_and_text_apart(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says(f"<think>Hm.</think>I look.\n<tool_call>\n{CALL_JSON}\n</tool_call>"))
    body = {"messages": HI, "tools": [{"name": "get_weather"}], "tool_parser": "hermes"}
    found = client.post("/generate", json=body).json()
    assert (found["model"], found["thinking"], found["pre_tool_text"]) == ("up", "Hm.", "I look.")
    (call,) = found["tool_calls"]
    assert {name: call[name] for name in PARIS} == PARIS
    assert found["finish_reason"] == "tool_calls"


def test_generate_refuses_by_name_what_an_upstream_can_not_do(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("Yes"))
    for name in ("max_thinking_tokens", "max_response_tokens"):
        response = client.post("/generate", json={"messages": HI, name: 10})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
    assert not upstream.asked
