"""What an upstream is asked: everything that a client says, in a form that the upstream knows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.requests import NamedTool, ToolChoice
from mlx_server.upstream.request import NO_RESULT, messages_of, with_system_prompt
from mlx_server.upstream.spec import UpstreamCapabilities
from tests.tables import cases
from tests.upstream.playing import (
    CALL_JSON,
    PARIS,
    USAGE,
    WEATHER,
    Json,
    PlayingServer,
    answered,
    call,
    chat,
    delta,
    events,
    gateway,
    in_chunks,
    in_one,
    says,
    streamed,
)

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}

MISSING = (
    *("tools", "tool_choice", "parallel_tool_calls", "json_schema", "reasoning_effort"),
    *("sampling", "penalties", "seed", "stop", "logit_bias", "logprobs", "completions"),
    "stream_usage",
)
BARE = dict.fromkeys(MISSING, False)
FULL = dict.fromkeys(
    ("chat_template_kwargs", "structured_outputs", "continue_message", "special_tokens"), True
)


@pytest.fixture(scope="module")
def client(upstream: PlayingServer) -> Iterator[TestClient]:
    models: dict[str, dict[str, Any]] = {
        "up": {"upstream_model": "there"},
        "full": {"capabilities": FULL | {"reasoning_messages": True, "developer_role": True}},
        "bare": {"capabilities": BARE, "family": "qwen3"},
        "own": {
            "defaults": {"temperature": 0.5, "max_tokens": 9, "top_k": 5},
            "template_kwargs": {"reasoning_effort": "low"},
            "capabilities": {"max_tokens_field": "max_completion_tokens"},
        },
    }
    with gateway(upstream.url, models) as client:
        yield client


def asked(client: TestClient, upstream: PlayingServer, **more: Any) -> Any:
    upstream.plays(says("Yes"))
    answered(client, **more)
    (body,) = upstream.bodies
    return body


def test_only_what_was_said(client: TestClient, upstream: PlayingServer) -> None:
    assert asked(client, upstream) == {
        "model": "there",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@cases
def test_it_is_passed_on(said: Any, client: TestClient, upstream: PlayingServer) -> None:
    answer = '{"city": "Paris"}' if "response_format" in said else "Yes"
    upstream.plays(says(answer))
    response = chat(client, **said)
    assert response.status_code == 200, response.text
    assert "x-mlx-server-ignored" not in response.headers
    (body,) = upstream.bodies
    if "tools" in said:
        assert body["tools"][0]["function"]["name"] == "get_weather"
        said = {"parallel_tool_calls": False}
    assert {name: body[name] for name in said} == said


def test_what_the_owner_says_where_the_client_does_not(
    client: TestClient, upstream: PlayingServer
) -> None:
    body = asked(client, upstream, model="own", temperature=0.9)
    assert (body["temperature"], body["max_completion_tokens"], body["top_k"]) == (0.9, 9, 5)
    assert body["reasoning_effort"] == "low"


@cases
def test_what_can_not_be_passed_on_is_refused_by_name(
    said: Any, param: str, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("Yes"))
    response = chat(client, **said)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"].startswith(param)
    assert not upstream.asked


def test_what_has_no_effect_is_listed(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(says("Yes"))
    said: Any = {"reasoning_effort": "low", "chat_template_kwargs": {"style": "dry"}}
    listed = chat(client, model="bare", **said).headers["x-mlx-server-ignored"]
    assert sorted(listed.split(", ")) == ["chat_template_kwargs.style", "reasoning_effort"]
    upstream.plays(says("Yes"))
    response = chat(client, model="full", **said)
    assert "x-mlx-server-ignored" not in response.headers
    assert upstream.bodies[0]["chat_template_kwargs"] == {"style": "dry"}


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "And kind."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I look.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
]


def test_messages_keep_their_roles_and_no_content_is_null(
    client: TestClient, upstream: PlayingServer
) -> None:
    sent = asked(client, upstream, messages=HISTORY, tools=[WEATHER])["messages"]
    assert [each["role"] for each in sent] == ["system", "system", "user", "assistant", "tool"]
    assert sent[3] == {"role": "assistant", "content": "", "tool_calls": HISTORY[3]["tool_calls"]}
    assert sent[4] == {"role": "tool", "content": "Rain", "tool_call_id": "call_1"}
    sent = asked(client, upstream, model="full", messages=HISTORY, tools=[WEATHER])["messages"]
    assert (sent[1]["role"], sent[3]["reasoning_content"]) == ("developer", "I look.")


def test_calls_and_results_as_text(client: TestClient, upstream: PlayingServer) -> None:
    sent = asked(client, upstream, model="bare", messages=HISTORY, tools=[WEATHER])["messages"]
    assert sent[3] == {"role": "assistant", "content": f"<tool_call>\n{CALL_JSON}\n</tool_call>"}
    assert sent[4] == {"role": "user", "content": "<tool_response>\nRain\n</tool_response>"}


def test_tools_for_a_model_without_them(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(says(f"<tool_call>\n{CALL_JSON}\n</tool_call>"))
    found = in_one(client, {"model": "bare", "tools": [WEATHER]})
    expected: tuple[Any, ...] = ([PARIS], "tool_calls", [])
    assert (found["calls"], found["finish"], found["repairs"]) == expected
    (body,) = upstream.bodies
    assert "tools" not in body
    assert "get_weather" in body["messages"][0]["content"]


REQUIRED: Any = {"tools": [WEATHER], "tool_choice": "required"}


def test_a_call_that_is_required_is_asked_for_again(
    client: TestClient, upstream: PlayingServer
) -> None:
    made = streamed(delta(**call('{"city": "Paris"}')), delta("tool_calls"), USAGE)
    upstream.plays(says("I won't."), made)
    found = in_one(client, REQUIRED)
    assert (found["calls"], found["text"], found["repairs"]) == ([PARIS], "", ["tools tool_calls"])
    first, second = upstream.bodies
    assert first["tool_choice"] == "required"
    assert [each["role"] for each in second["messages"]] == ["user", "assistant", "user"]
    upstream.plays(says("I won't."))
    assert in_chunks(client, REQUIRED)["unmet"] == [
        "tool_calls: one of the tools has to be called, and none was"
    ]
    assert len(upstream.asked) == 1


def test_json_that_breaks_its_schema_is_asked_for_again(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("It is Paris."), says('{"city": "Paris"}'))
    found = in_one(client, {"response_format": FORMAT})
    assert (found["text"], found["repairs"]) == ('{"city": "Paris"}', ["schema content"])
    first, second = upstream.bodies
    assert first["response_format"] == second["response_format"] == FORMAT
    assert [each["role"] for each in first["messages"]] == ["user"]
    system, *_, correction = second["messages"]
    assert '"additionalProperties"' in system["content"]
    assert "content: it is not one JSON value" in correction["content"]


def test_a_schema_for_a_model_that_knows_none(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(says('Sure:\n```json\n{"city": "Paris"}\n```'))
    found = in_one(client, {"model": "bare", "response_format": FORMAT})
    assert (found["text"], found["repairs"]) == ('{"city": "Paris"}', ["fences content"])
    (body,) = upstream.bodies
    assert "response_format" not in body
    assert '"additionalProperties"' in body["messages"][0]["content"]


def test_an_empty_answer_is_asked_for_again(client: TestClient, upstream: PlayingServer) -> None:
    empty = streamed(delta(reasoning="Hm."), delta("stop"), USAGE)
    then = streamed(delta(reasoning="Well."), delta(content="Yes"), delta("stop"), USAGE)
    for reported, shown in ((in_one, "Well."), (in_chunks, "Hm.")):
        upstream.plays(empty, then)
        found = reported(client, {})
        assert (found["text"], found["repairs"]) == ("Yes", ["empty content"])
        assert found["reasoning"] == shown  # a stream has shown the first attempt's before its end
        assert upstream.bodies[1]["messages"][-1]["role"] == "user"
    upstream.plays(streamed(delta("stop"), USAGE))
    assert in_one(client, {})["unmet"] == ["content: the upstream's answer is empty"]
    assert len(upstream.asked) == 2


def test_reasoning_is_the_answer_if_there_is_no_other(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(streamed(delta(reasoning="It is Paris."), delta("stop"), USAGE))
    found = in_one(client, {})
    assert found["text"] == "It is Paris."
    assert "reasoning content" in found["repairs"]


def test_stop_strings_hold_wherever_they_are_sent(
    client: TestClient, upstream: PlayingServer
) -> None:
    for model in ("up", "bare"):
        upstream.plays(says("One, two, three"))
        found = in_one(client, {"model": model, "stop": [", three"]})
        assert (found["text"], found["finish"]) == ("One, two", "stop")
    assert "stop" not in upstream.bodies[0]


def test_one_call_where_only_one_may_come(client: TestClient, upstream: PlayingServer) -> None:
    two = (delta(**call('{"city": "Paris"}')), delta(**call('{"city": "Rome"}', id="b", index=1)))
    upstream.plays(streamed(*two, delta("tool_calls"), USAGE))
    assert in_one(client, {"tools": [WEATHER], "parallel_tool_calls": False})["calls"] == [PARIS]


def test_each_of_n_answers_is_a_request(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(says("Yes"), says("No"))
    found = answered(client, n=2, seed=3)
    assert {choice["message"]["content"] for choice in found["choices"]} == {"Yes", "No"}
    assert sorted(body["seed"] for body in upstream.bodies) == [3, 4]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (7, 10)


def test_completions_of_text(client: TestClient, upstream: PlayingServer) -> None:
    text = "<think>Is it?</think> Paris"  # the prompt is the client's own, and so is the reading
    upstream.plays(streamed({"choices": [{"text": text, "finish_reason": "stop"}]}, USAGE))
    body = {"model": "up", "prompt": "The capital is", "max_tokens": 3}
    found = client.post("/v1/completions", json=body).json()
    assert found["choices"][0]["text"] == text
    (asked,) = upstream.asked
    assert (asked.path, asked.body["prompt"]) == ("/v1/completions", "The capital is")
    assert client.post("/v1/completions", json={**body, "model": "bare"}).status_code == 400
    echo = client.post("/v1/completions", json={**body, "echo": True})
    assert echo.json()["error"]["param"] == "echo"


@cases
def test_special_tokens_come_from_an_upstream_that_has_them(
    client: TestClient, upstream: PlayingServer, model: str, said: Any, sent: Any, listed: Any
) -> None:
    text = "<think>Hm.</think>Paris"
    upstream.plays(streamed({"choices": [{"text": text, "finish_reason": "stop"}]}, USAGE))
    body = {"model": model, "prompt": "The capital is", **said}
    response = client.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["text"] == text
    assert response.headers.get("x-mlx-server-ignored") == listed
    (found,) = upstream.bodies
    assert {k: v for k, v in found.items() if k == "skip_special_tokens"} == sent


def test_a_message_is_continued_where_that_can_be(
    client: TestClient, upstream: PlayingServer
) -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel"}]
    said: Any = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    upstream.plays(says("lo"))
    found = answered(client, model="full", **said)
    assert found["choices"][0]["message"]["content"].endswith("lo")
    assert upstream.bodies[0]["continue_final_message"] is True
    assert chat(client, **said).status_code == 400


def test_tokens_can_not_be_counted_here(client: TestClient) -> None:
    body = {"model": "up", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    response = client.post("/v1/messages/count_tokens", json=body)
    assert response.status_code == 400
    assert "another server" in response.text


def test_messages_begin_with_an_estimate_and_end_with_the_count(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("Yes"))
    said = {"model": "up", "messages": [{"role": "user", "content": "word " * 800}], "stream": True}
    text = client.post("/v1/messages", json={**said, "max_tokens": 9}).text
    usages = [each.get("message", each).get("usage") for each in events(text)]
    first, last = (usage["input_tokens"] for usage in usages if usage)
    assert 500 < first < 2000
    assert last == 7


def test_it_is_listed_as_any_other_and_takes_no_engine(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("Yes"))
    answered(client)
    listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
    assert listed["bare"]["family"] == "qwen3"
    pool = client.get("/v1/pool").json()
    assert pool["engine"] is None
    owner: Any = client.app
    assert not owner.state.pool.engines[0].supervisor.alive
    assert {each["id"]: each["source"] for each in pool["models"]}["up"] == "openai:there"
    assert "127.0.0.1" not in str(pool)
    assert {(each["state"], each["bytes"]) for each in pool["models"]} == {("ready", 0)}
    assert client.get("/health").status_code == 200
    assert chat(client, model="other").status_code == 404
    shown = client.post("/api/show", json={"model": "up"}).json()
    assert "tools" in shown["capabilities"]
    metrics = client.get("/metrics").text
    assert 'mlx_server_completion_tokens_total{model="up"}' in metrics


CAN = UpstreamCapabilities()
CALLED = Message("assistant", tool_calls=(ToolCall("c", "look", "{}"),))


def sent(
    *messages: Message, can: UpstreamCapabilities = CAN, choice: ToolChoice = "auto", **more: Any
) -> list[Any]:
    conversation = Conversation(messages, **more)
    return messages_of(conversation, can, choice, tells_format=False)


@cases
def test_the_leading_system_prompt_gets_a_paragraph(before: list[Any], after: list[Any]) -> None:
    assert with_system_prompt(before, ["More", "."]) == after


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("required", "Call one of the functions now."),
        (NamedTool("look"), "Call the function look now."),
    ],
)
def test_a_required_call_is_demanded_where_tools_can_not_be_sent(
    choice: ToolChoice, sentence: str
) -> None:
    can = replace(CAN, tools=False)
    system, _ = sent(Message("user", "Hi"), tools=(Tool("look"),), can=can, choice=choice)
    assert system["content"].endswith(sentence)


def test_calls_and_results_are_in_pairs() -> None:
    """OpenAI's API, and most others, refuse every other history."""
    late, stray = Message("tool", "x", tool_call_id="c"), Message("tool", "y", tool_call_id="z")
    found = sent(Message("user", "Hi"), CALLED, stray, Message("user", "Stop."), late)
    assert [each["role"] for each in found] == ["user", "assistant", "tool", "user", "user", "user"]
    assert (found[2]["tool_call_id"], found[2]["content"]) == ("c", NO_RESULT)
    assert ["y" in found[3]["content"], "x" in found[5]["content"]] == [True, True]
    twice = sent(CALLED, late, late)
    assert [each["role"] for each in twice] == ["assistant", "tool", "user"]
    assert [each["role"] for each in sent(Message("user", "Hi"), CALLED)] == ["user", "assistant"]


DATA = "iVBORw0KGgo="
URL = f"data:image/png;base64,{DATA}"
SEEN: Json = {"type": "image_url", "image_url": {"url": URL}}
BLOCK: Json = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": DATA},
}
LINE = "[image: image/png, not shown: this model reads only text]"
IGNORED = "x-mlx-server-ignored"


@pytest.fixture(scope="module")
def seeing(upstream: PlayingServer) -> Iterator[TestClient]:
    models: Json = {"sees": {"capabilities": {"images": True}}, "reads": {}}
    with gateway(upstream.url, models) as client:
        yield client


def user(*parts: Json) -> list[Json]:
    return [{"role": "user", "content": [*parts]}]


ASKED: dict[str, tuple[str, Json, str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": user({"type": "text", "text": "What?"}, SEEN)},
        "messages.content.image_url",
    ),
    "messages": (
        "/v1/messages",
        {"messages": user({"type": "text", "text": "What?"}, BLOCK), "max_tokens": 9},
        "messages.content.image",
    ),
    "responses": (
        "/v1/responses",
        {
            "input": user(
                {"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": URL}
            )
        },
        "input.content.input_image",
    ),
    "ollama": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "What?", "images": [DATA]}], "stream": False},
        "messages.images",
    ),
    "generate": ("/api/generate", {"prompt": "What?", "images": [DATA], "stream": False}, "images"),
}


@pytest.mark.parametrize("dialect", ASKED)
def test_a_model_that_sees_gets_the_image(
    seeing: TestClient, upstream: PlayingServer, dialect: str
) -> None:
    path, body, place = ASKED[dialect]
    for model in ("sees", "reads"):
        upstream.plays(says("A cat."))
        answer = seeing.post(path, json={"model": model, **body})
        assert answer.status_code == 200, answer.text
        (sent,) = upstream.bodies[-1]["messages"]
        parts: list[Any] = [{"type": "text", "text": "What?"}, SEEN]
        told = f"What?\n{LINE}"
        if path.startswith("/api/"):  # Ollama's pictures have no place in the text, and come first
            parts, told = parts[::-1], f"{LINE}\nWhat?"
        assert sent["content"] == (told if model == "reads" else parts)
        assert (place in answer.headers.get(IGNORED, "")) == (model == "reads")


def test_the_image_of_a_result_follows_it(seeing: TestClient, upstream: PlayingServer) -> None:
    use: Json = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result: Json = {"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]}
    talk: list[Any] = [*user(), {"role": "assistant", "content": [use]}, *user(result)]
    upstream.plays(says("A cat."))
    body = {"model": "sees", "messages": talk, "max_tokens": 9}
    answer = seeing.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    *_, called, told, shown = upstream.bodies[-1]["messages"]
    assert [called["role"], told["role"], shown["role"]] == ["assistant", "tool", "user"]
    assert "it follows in the next message" in told["content"]
    assert shown["content"] == [SEEN]
    assert IGNORED not in answer.headers


def test_an_image_is_not_part_of_the_estimated_prompt(
    seeing: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("A cat."))
    large = {**BLOCK, "source": {**BLOCK["source"], "data": DATA.rstrip("=") * 1000}}
    body = {"model": "sees", "messages": user(large), "max_tokens": 9, "stream": True}
    begun = next(events(seeing.post("/v1/messages", json=body).text))
    assert begun["message"]["usage"]["input_tokens"] < 100
