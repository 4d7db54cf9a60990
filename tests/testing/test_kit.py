"""The fixture as a test of an app has it, and its server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlx_server.api.replay import GIVEN
from mlx_server.testing import MlxReplay, TestRunServer, call, raw, say, think, tokens
from tests.live.server import PLAIN

pytest_plugins = ["mlx_server.testing"]


pytestmark = pytest.mark.slow


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.mark.parametrize(
    ("family", "choice"),
    [("gpt_oss", "required"), ("qwen3", "required"), ("kimi_k3", "auto"), ("llama4", "auto")],
)
def test_one_line_is_right_for_each_family(mlx_replay: MlxReplay, family: str, choice: Any) -> None:
    weather = think("I look.") + call("get_weather", city="Paris")
    mlx_replay.answers(family, [weather, say("It rains.")], model="gpt-4o-mini")
    completions = mlx_replay.client.chat.completions
    first = completions.create(model="gpt-4o-mini", messages=ASKED, tools=TOOLS, tool_choice=choice)
    message = first.choices[0].message
    assert message.to_dict()["reasoning_content"] == "I look."
    assert message.tool_calls
    made = message.tool_calls[0]
    assert made.type == "function"
    assert (made.function.name, json.loads(made.function.arguments)) == (
        "get_weather",
        {"city": "Paris"},
    )
    result = {"role": "tool", "tool_call_id": made.id, "content": "rain"}
    messages = [*ASKED, message.to_dict(), result]
    then = completions.create(model="gpt-4o-mini", messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in then) == "It rains."
    asked = mlx_replay.requests
    assert [each.path for each in asked] == ["/v1/chat/completions"] * 2
    assert asked[1].body["messages"][-1] == result


def test_raw_output_and_tokens_are_played_as_they_are(mlx_replay: MlxReplay) -> None:
    name = mlx_replay.answers("plain", [raw("<think>a</think>b"), tokens([72, 105])])
    completions = mlx_replay.client.chat.completions
    first, second = (completions.create(model=name, messages=ASKED) for _ in range(2))
    assert first.choices[0].message.content == "b"
    assert second.usage
    assert second.usage.completion_tokens == 3


def test_an_answer_with_a_call_waits_for_its_result_whatever_ended_it(
    mlx_replay: MlxReplay,
) -> None:
    called = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>\n\nNow END'
    mlx_replay.answers("qwen3", [raw(called)])
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    body = {"max_tokens": 99, "messages": ASKED, "tools": [tool], "stop_sequences": ["END"]}
    with httpx.Client(**PLAIN, base_url=mlx_replay.url) as http:
        answer = http.post("/v1/messages", json={"model": "qwen3", **body}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert [block["type"] for block in answer["content"]] == ["tool_use", "text"]


def test_other_endpoints_play_them_too(mlx_replay: MlxReplay) -> None:
    mlx_replay.answers("qwen3", [say("One."), say("Two.")])
    with httpx.Client(**PLAIN, base_url=mlx_replay.url) as http:
        one = http.post("/v1/responses", json={"model": "qwen3", "input": "Hi"}).json()
        body = {"model": "qwen3", "max_tokens": 9, "messages": ASKED}
        two = http.post("/v1/messages", json=body).json()
    assert one["output"][0]["content"][0]["text"] == "One."
    assert two["content"][0]["text"] == "Two."
    assert [each.path for each in mlx_replay.requests] == ["/v1/responses", "/v1/messages"]


def test_an_app_may_call_another_model_by_the_same_name_in_each_test(mlx_replay: MlxReplay) -> None:
    for family in ("qwen3", "llama4"):
        mlx_replay.answers(family, [say(family)], model="mine")
        answer = mlx_replay.client.chat.completions.create(model="mine", messages=ASKED)
        assert answer.choices[0].message.content == family
    with pytest.raises(ValueError, match="'qwen3' is that of the model qwen3"):
        mlx_replay.answers("llama4", [say("?")], model="qwen3")


def test_an_answer_that_the_request_does_not_allow_is_named(mlx_replay: MlxReplay) -> None:
    mlx_replay.answers("qwen3", [say("No call.")])
    with pytest.raises(openai.BadRequestError, match="answer 1 given for qwen3 leaves the grammar"):
        mlx_replay.client.chat.completions.create(
            model="qwen3", messages=ASKED, tools=TOOLS, tool_choice="required"
        )


@pytest.mark.parametrize(
    ("family", "answer", "message"),
    [
        ("gpt5", say("Hi."), "no model family 'gpt5'. Known families: .*gpt_oss"),
        ("gemma3", call("f"), "The family gemma3 has no way to write calls of tools"),
        ("smollm2", think("Hm.") + say("Hi."), "smollm2 has no way to write thoughts"),
        ("qwen3", say("<|im_end|>"), "qwen3 has no way to write this answer as a whole"),
        ("plain", tokens([1_000_000]), "`output_token_ids` has 1000000; the ids .* go from 0 to"),
        ("plain", raw("\ud800"), "surrogate"),
    ],
)
def test_an_answer_that_can_not_be_written_is_refused(
    mlx_replay: MlxReplay, family: str, answer: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mlx_replay.answers(family, [answer])


@pytest.mark.parametrize("wrong", ["It rains.", None, 5, [say("Hi.")]])
def test_what_is_no_answer_is_refused(mlx_replay: MlxReplay, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"is not an answer. Write it as say\(...\)"):
        mlx_replay.answers("qwen3", [wrong])


def test_no_answers_are_a_mistake(mlx_replay: MlxReplay) -> None:
    with pytest.raises(ValueError, match="answers"):
        mlx_replay.answers("qwen3", [])


def test_nobody_else_has_the_key_of_the_tests_route(mlx_replay: MlxReplay) -> None:
    with httpx.Client(**PLAIN, base_url=mlx_replay.url) as http:
        for method in ("GET", "POST", "DELETE"):
            for key in ({}, {"Authorization": "Bearer none"}):
                assert http.request(method, GIVEN, json={}, headers=key).status_code == 401


@pytest.fixture
def two_servers(tmp_path: Path) -> Iterator[list[TestRunServer]]:
    servers = []
    try:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            servers.append(TestRunServer(tmp_path / name))
        yield servers
    finally:
        for server in servers:
            server.stop()


def test_sessions_next_to_each_other_share_nothing(two_servers: list[TestRunServer]) -> None:
    kits = [MlxReplay(server) for server in two_servers]
    for kit, text in zip(kits, ("A.", "B."), strict=True):
        kit.answers("qwen3", [say(text)])
    for kit, text in zip(kits, ("A.", "B."), strict=True):
        answer = kit.client.chat.completions.create(model="qwen3", messages=ASKED)
        assert answer.choices[0].message.content == text
        kit.check()
