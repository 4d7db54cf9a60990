"""Answers that are asked for in one request or several, played without a server."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mlx_server.clients.emulation import checked_answer, two_passes, with_hermes_tools
from mlx_server.clients.exchange import Exchange, Wire, run
from mlx_server.errors import BadRequest
from mlx_server.repair.allowed import ALL_REPAIRS
from tests.clients.asked import ASKED, content
from tests.clients.recorded import WEATHER, call, completion

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def played(exchange: Exchange, *answers: Wire) -> tuple[Wire, list[Wire]]:
    """The last answer, and the bodies that were sent."""
    left, bodies = list(answers), list[Wire]()

    def send(body: Wire) -> Wire:
        bodies.append(body)
        return left.pop(0)

    answer = run(exchange, send)
    assert left == []
    return answer, bodies


def roles(body: Wire) -> list[str]:
    return [message["role"] for message in body["messages"]]


def test_a_schema_is_described_checked_and_asked_for_again() -> None:
    body = {"messages": ASKED, "response_format": FORMAT}
    wrong, right = completion('{"age": "old"}'), completion('{"age": 5}')
    answer, bodies = played(checked_answer(body, "gpt_oss"), wrong, right)
    assert content(answer) == '{"age": 5}'
    assert '"integer"' in bodies[0]["messages"][0]["content"]
    assert roles(bodies[1]) == ["system", "user", "assistant", "user"]
    assert "age" in bodies[1]["messages"][-1]["content"]
    assert bodies[1]["messages"][0] == bodies[0]["messages"][0]
    assert "mlx_server" not in answer


def test_what_stays_wrong_is_reported() -> None:
    body = {"messages": ASKED, "response_format": FORMAT}
    once = replace(ALL_REPAIRS, retries=0)
    answer, _ = played(checked_answer(body, "gpt_oss", once), completion("Five."))
    assert content(answer) == "Five."
    assert answer["mlx_server"]["unmet"]


@pytest.mark.parametrize(
    ("said", "wanted", "repairs"),
    [
        ({"content": '```json\n{"age": 5}\n```'}, '{"age": 5}', ["fences"]),
        ({"content": None, "reasoning_content": '{"age": 5}'}, '{"age": 5}', ["reasoning"]),
        ({"content": "{'age': 5,}"}, '{"age": 5}', ["json"]),
    ],
)
def test_json_is_put_right_without_another_request(
    said: dict[str, Any], wanted: str, repairs: list[str]
) -> None:
    body = {"messages": ASKED, "response_format": FORMAT}
    answer, _ = played(checked_answer(body, "gpt_oss"), completion(**said))
    assert content(answer) == wanted
    assert [each["what"] for each in answer["mlx_server"]["repairs"]] == repairs


def test_an_empty_answer_is_asked_for_again_as_often_as_allowed() -> None:
    twice = replace(ALL_REPAIRS, retries=2)
    none, some = completion(None), completion("Five.")
    answer, bodies = played(checked_answer({"messages": ASKED}, "gpt_oss", twice), none, none, some)
    assert content(answer) == "Five."
    assert len(bodies) == 3


def test_thoughts_that_were_not_closed_are_no_answer() -> None:
    answer, bodies = played(
        checked_answer({"messages": ASKED}, "qwen3"), completion("<think>Fi"), completion("Five.")
    )
    assert content(answer) == "Five."
    assert len(bodies) == 2


def test_a_required_call_is_asked_for_again() -> None:
    body = {"messages": ASKED, "tools": [WEATHER], "tool_choice": "required"}
    made = completion(None, tool_calls=[call("get_weather", '{"city": "Paris"}')])
    answer, _ = played(checked_answer(body, "gpt_oss"), completion("It rains."), made)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_an_answer_that_was_cut_off_is_taken() -> None:
    cut = completion("It ra", reason="length")
    answer, _ = played(checked_answer({"messages": ASKED}, "gpt_oss"), cut)
    assert content(answer) == "It ra"


def test_thoughts_have_a_limit_and_the_second_request_may_call_a_tool() -> None:
    body = {"messages": ASKED, "tools": [WEATHER], "max_tokens": 50, "stop": "END"}
    thought = completion("<think>\nParis, or", reason="length")
    made = completion(None, tool_calls=[call("get_weather", '{"city": "Paris"}')])
    answer, (first, second) = played(two_passes(body, "think", 8, "qwen3"), thought, made)
    assert (first["max_tokens"], first["stop"]) == (8, ["END", "</think>"])
    assert (second["max_tokens"], second["stop"]) == (50, "END")
    assert second["messages"][-1]["content"] == "<think>\nParis, or\n</think>\n\n"
    assert second["continue_final_message"]
    assert second["tools"] == first["tools"] == [WEATHER]
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "Paris, or"
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["get_weather"]
    assert answer["usage"]["completion_tokens"] == 10
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_thoughts_that_ended_in_time_are_continued_too() -> None:
    thought = completion(None, reasoning_content="Paris.")
    thought["choices"][0]["stop_reason"] = "</think>"
    answer, bodies = played(
        two_passes({"messages": ASKED}, "think", 8, "qwen3"), thought, completion("Yes.")
    )
    assert len(bodies) == 2
    assert answer["choices"][0]["message"]["reasoning_content"] == "Paris."


def test_an_answer_without_thoughts_needs_no_second_request() -> None:
    answer, bodies = played(
        two_passes({"messages": ASKED}, "think", 8, "qwen3"), completion("Yes.")
    )
    assert (content(answer), len(bodies)) == ("Yes.", 1)


def test_a_model_without_tags_can_not_have_two_passes() -> None:
    with pytest.raises(BadRequest, match="no tags around their reasoning"):
        played(two_passes({"messages": ASKED}, "think", 8, "gpt_oss"))


def test_tools_calls_and_results_become_text_for_a_server_without_tools() -> None:
    messages: Sequence[Wire] = [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call("get_weather", "{}")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    named = {"type": "function", "function": {"name": "get_weather"}}
    made = with_hermes_tools({"messages": messages, "tools": [WEATHER], "tool_choice": named})
    assert set(made) == {"messages"}
    system, _, assistant, result = made["messages"]
    assert system["content"].startswith("Be brief.\n\n# Tools")
    assert "get_weather now" in system["content"]
    assert assistant["content"] == (
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    )
    assert result == {"role": "user", "content": "<tool_response>\nRain.\n</tool_response>"}
    assert with_hermes_tools({"messages": messages}) == {"messages": messages}


def test_contents_that_have_parts_keep_them() -> None:
    def parts(text: str) -> list[Wire]:
        return [{"type": "text", "text": text}]

    messages: Sequence[Wire] = [
        {"role": "system", "content": parts("Be brief.")},
        {"role": "assistant", "content": parts("Hm."), "tool_calls": [call("get_weather", "")]},
        {"role": "tool", "tool_call_id": "call_1", "content": parts("Rain.")},
    ]
    made = with_hermes_tools({"messages": messages, "tools": [WEATHER]})
    system, assistant, result = [
        [part["text"] for part in message["content"]] for message in made["messages"]
    ]
    assert system[0] == "Be brief."
    assert system[1].startswith("\n\n# Tools")
    assert assistant[0] == "Hm."
    assert '"arguments": {}}' in assistant[1]
    assert result == ["<tool_response>\n", "Rain.", "\n</tool_response>"]
