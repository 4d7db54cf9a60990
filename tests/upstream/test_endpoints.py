"""What endpoints do around an answer, with a model that another server has: what it wants back
with results (signatures, its own reasoning), tools of MCP servers, and /generate."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.app import create_app
from mlx_server.config.settings import Settings, StoreSettings, validated
from tests.tables import cases
from tests.upstream.playing import (
    CALL_JSON,
    PARIS,
    PARIS_JSON,
    TIME,
    USAGE,
    WEATHER,
    Json,
    PlayingServer,
    Reply,
    chat,
    delta,
    events,
    indexed,
    says,
    settings,
    streamed,
    whole,
)

HOSTILE = str(Path(__file__).parents[1] / "mcp" / "hostile.py")
EYE = {"type": "mcp", "server_label": "eye", "connector_id": "quiet", "require_approval": "never"}
LOOK = '{"name": "look", "arguments": {}}'
HI = [{"role": "user", "content": "hi"}]
SIGNED: Json = {"google": {"thought_signature": "c2lnbmF0dXJl"}}
ENCRYPTED: Json = {"type": "reasoning.encrypted", "data": "xyz", "id": "r1", "index": 1}
DETAILS = [{"type": "reasoning.text", "text": "Hm. So.", "signature": "sig", "index": 0}, ENCRYPTED]
ASKED: Json = {"role": "user", "content": "Weather?"}
TOOLS = [WEATHER, TIME]


def made(**more: Any) -> Json:
    function = {"name": "get_weather", "arguments": PARIS_JSON}
    return {"index": 0, "id": "call_1", "type": "function", "function": function, **more}


SECOND: Json = {
    "index": 1,
    "id": "call_2",
    "type": "function",
    "function": {"name": "get_time", "arguments": "{}"},
}
GEMINI = streamed(delta(tool_calls=[made(extra_content=SIGNED), SECOND]), delta("stop"), USAGE)
MESSAGE: Json = {"content": None, "tool_calls": [made(extra_content=SIGNED), SECOND]}
GEMINI_WHOLE = whole(
    {"choices": [{"message": MESSAGE, "finish_reason": "tool_calls"}], "usage": USAGE["usage"]}
)
LATE = streamed(
    delta(**indexed(0, "call_1", name="get_weather")),
    delta(
        tool_calls=[{"index": 0, "extra_content": SIGNED, "function": {"arguments": PARIS_JSON}}]
    ),
    delta(tool_calls=[SECOND]),
    delta("tool_calls"),
    USAGE,
)
OPENROUTER = streamed(
    delta(
        reasoning="Hm.", reasoning_details=[{"type": "reasoning.text", "text": "Hm.", "index": 0}]
    ),
    delta(
        reasoning=" So.",
        reasoning_details=[
            {"type": "reasoning.text", "text": " So.", "signature": "sig", "index": 0},
            ENCRYPTED,
        ],
    ),
    delta(tool_calls=[made(), SECOND]),
    delta("tool_calls"),
    USAGE,
)


@pytest.fixture
def client(upstream: PlayingServer, tmp_path: Path) -> Iterator[TestClient]:
    models: Json = {
        "up": {"family": "qwen3"},
        "strict": {"capabilities": {"extra_content": False, "reasoning_messages": False}},
        "all": {"capabilities": {"reasoning_messages": True}},
        "named": {"capabilities": {"reasoning_messages": True, "reasoning_field": "reasoning"}},
    }
    made: Any = {
        "models": settings(upstream.url, models).models,
        "connectors": {"quiet": {"command": sys.executable, "args": (HOSTILE, "quiet")}},
        "store": StoreSettings(data_dir=tmp_path),
    }
    app = create_app(validated(Settings, made))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


GoOn = Callable[[TestClient], None]
"""Asks, sends the answer back as it came with results of its calls, and asks for the next one."""


def in_chat(client: TestClient, model: str = "up", **more: Any) -> Any:
    first = chat(client, model=model, messages=[ASKED], tools=TOOLS, **more).json()
    message = first["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "18"}
        for call in message["tool_calls"]
    ]
    return chat(client, model=model, messages=[ASKED, message, *results], tools=TOOLS)


def in_chat_chunks(client: TestClient) -> None:
    """As a client puts chunks together: fields of a call's first piece are the call's."""
    text = chat(client, messages=[ASKED], tools=TOOLS, stream=True).text
    message: Json = {"role": "assistant", "content": None, "tool_calls": []}
    for chunk in events(text):
        for choice in chunk["choices"]:
            said = choice["delta"]
            message |= {k: v for k, v in said.items() if k.startswith("reasoning_d")}
            for piece in said.get("tool_calls", ()):
                if piece["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(piece)
                else:
                    known = message["tool_calls"][piece["index"]]["function"]
                    known["arguments"] += piece["function"]["arguments"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "18"}
        for call in message["tool_calls"]
    ]
    assert chat(client, messages=[ASKED, message, *results], tools=TOOLS).status_code == 200


def test_what_each_piece_has_again_is_counted_once(
    client: TestClient, upstream: PlayingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UPSTREAM_EXTRA_BYTES", 1000)
    detail = {"type": "reasoning.text", "index": 0, "format": "f" * 100, "text": "Hm."}
    begin = delta(tool_calls=[made(extra_content=SIGNED)])
    again = delta(
        tool_calls=[{"index": 0, "extra_content": SIGNED, "function": {"arguments": " "}}],
        reasoning_details=[detail],
    )
    upstream.plays(streamed(begin, *[again] * 100, delta("tool_calls"), USAGE), says("Rain."))
    assert in_chat(client).status_code == 200
    assert sent_back(upstream)["tool_calls"][0]["extra_content"] == SIGNED


def flat(tools: list[Json]) -> list[Json]:
    return [{"type": "function", **tool["function"]} for tool in tools]


def results_of(output: list[Json]) -> list[Json]:
    return [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "18"}
        for item in output
        if item["type"] == "function_call"
    ]


def in_response_items(client: TestClient) -> None:
    body: Json = {"model": "up", "input": [ASKED], "tools": flat(TOOLS), "store": False}
    output = client.post("/v1/responses", json=body).json()["output"]
    body["input"] = [ASKED, *output, *results_of(output)]
    assert client.post("/v1/responses", json=body).status_code == 200


def in_streamed_response_items(client: TestClient) -> None:
    body: Json = {"model": "up", "input": [ASKED], "tools": flat(TOOLS), "store": False}
    text = client.post("/v1/responses", json={**body, "stream": True}).text
    output = [e["item"] for e in events(text) if e["type"] == "response.output_item.done"]
    body["input"] = [ASKED, *output, *results_of(output)]
    assert client.post("/v1/responses", json=body).status_code == 200


def in_kept_responses(client: TestClient) -> None:
    """The client sends nothing but the results."""
    body: Json = {"model": "up", "input": [ASKED], "tools": flat(TOOLS)}
    first = client.post("/v1/responses", json=body).json()
    body |= {"input": results_of(first["output"]), "previous_response_id": first["id"]}
    assert client.post("/v1/responses", json=body).status_code == 200


def in_messages(client: TestClient) -> None:
    functions = [tool["function"] for tool in TOOLS]
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    body: Json = {"model": "up", "max_tokens": 100, "messages": [ASKED], "tools": tools}
    content = client.post("/v1/messages", json=body).json()["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "18"}
        for block in content
        if block["type"] == "tool_use"
    ]
    said = {"role": "assistant", "content": content}
    body["messages"] = [ASKED, said, {"role": "user", "content": results}]
    response = client.post("/v1/messages", json=body)
    assert response.status_code == 200
    assert "x-mlx-server-ignored" not in response.headers


WAYS: list[GoOn] = [
    *(in_chat, in_chat_chunks, in_response_items, in_streamed_response_items),
    *(in_kept_responses, in_messages),
]


def sent_back(upstream: PlayingServer, request: int = 1) -> Json:
    """The model's first message in one of the requests."""
    messages = upstream.bodies[request]["messages"]
    found: Json = next(each for each in messages if each["role"] == "assistant")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("reply", [GEMINI, GEMINI_WHOLE, LATE], ids=["at once", "whole", "late"])
@pytest.mark.parametrize("go_on", WAYS)
def test_a_signature_comes_back_with_its_call(
    go_on: GoOn, reply: Reply, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(reply, says("Rain."))
    go_on(client)
    first, second = sent_back(upstream)["tool_calls"]
    assert first["extra_content"] == SIGNED
    assert "extra_content" not in second


@pytest.mark.parametrize("go_on", WAYS)
def test_details_of_the_reasoning_come_back_as_they_were(
    go_on: GoOn, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(OPENROUTER, says("Rain."))
    go_on(client)
    message = sent_back(upstream)
    assert message["reasoning_details"] == DETAILS
    assert "extra_content" not in message["tool_calls"][0]
    assert "reasoning" not in message


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("go_on", [in_chat, in_response_items, in_kept_responses, in_messages])
def test_reasoning_comes_back_in_the_field_in_which_it_came(
    go_on: GoOn, name: str, client: TestClient, upstream: PlayingServer
) -> None:
    said: Json = {name: "I look."}
    upstream.plays(
        streamed(delta(**said), delta(tool_calls=[made()]), delta("tool_calls"), USAGE),
        says("Rain."),
    )
    go_on(client)
    message = sent_back(upstream)
    assert {k: v for k, v in message.items() if k.startswith("reasoning")} == {name: "I look."}


def test_reasoning_of_earlier_turns_does_not(client: TestClient, upstream: PlayingServer) -> None:
    earlier = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    later = {**earlier, "tool_calls": [made()]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "18"}
    history = [ASKED, earlier, ASKED, later, result]
    for model, expected in (("up", [None, "Hm."]), ("all", ["Hm.", "Hm."]), ("strict", [None] * 2)):
        upstream.plays(streamed(delta(reasoning_content="Hm."), delta(content="x"), delta("stop")))
        for _ in range(2):  # what it takes is learnt from its first answer
            response = chat(client, model=model, messages=history, tools=TOOLS)
        sent = [each for each in upstream.bodies[1]["messages"] if each["role"] == "assistant"]
        assert [each.get("reasoning_content") for each in sent] == expected
        listed = response.headers.get("x-mlx-server-ignored", "")
        is_ignored = "messages.reasoning_content" in listed
        assert is_ignored == (model == "strict")


@pytest.mark.parametrize(("model", "field"), [("all", "reasoning_content"), ("named", "reasoning")])
def test_the_owner_names_the_field_of_reasoning(
    model: str, field: str, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("Rain."))
    history = [ASKED, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, ASKED]
    assert chat(client, model=model, messages=history).status_code == 200
    message = sent_back(upstream, request=0)
    assert {k: v for k, v in message.items() if k.startswith("reasoning")} == {field: "Hm."}


def test_an_upstream_that_takes_no_such_fields(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(GEMINI, says("Rain."))
    response = in_chat(client, "strict")
    assert "extra_content" in response.headers["x-mlx-server-ignored"]
    assert "extra_content" not in sent_back(upstream)["tool_calls"][0]


@cases
def test_calls_of_every_kind_keep_theirs(
    path: str, body: Json, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("Done."))
    response = client.post(path, json={"model": "up", **body})
    assert response.status_code == 200, response.text
    (call,) = sent_back(upstream, request=0)["tool_calls"]
    assert call["extra_content"] == SIGNED


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
