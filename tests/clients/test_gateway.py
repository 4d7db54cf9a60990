"""Answers of other servers: parsed, checked, requested again, with a budget and with tools."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mlx_server.clients.exchange import Exchange, Wire, arun, run
from mlx_server.clients.gateway import (
    ForeignStreamReader,
    checked_answer,
    read_completion,
    reading_options,
    two_passes,
    with_hermes_tools,
)
from mlx_server.errors import BadRequest, GenerationFailed, UpstreamFailed
from mlx_server.repair import ALL_REPAIRS
from mlx_server.upstream.reading import ReadingOptions
from tests.clients.asked import ASKED, content
from tests.clients.recorded import WEATHER, call, chunks, completion

PARIS = '{"city": "Paris"}'
ROME = '{"city": "Rome"}'
JSON_CALL = f'{{"name": "get_weather", "arguments": {PARIS}}}'
LEAKED = (
    "<|channel|>analysis<|message|>I should look.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>"
)

CALLS: dict[str, dict[str, Any]] = {
    "Harmony as text": {"content": LEAKED},
    "Harmony without its control tokens": {
        "content": f"analysisI should look.assistantcommentary to=functions.get_weather json{PARIS}"
    },
    "a call in the content": {"content": JSON_CALL, "reasoning": "I should look."},
    "a fenced call": {"content": f"```json\n{JSON_CALL}\n```", "reasoning": "I should look."},
    "a call at the end of the thoughts": {
        "content": None,
        "reasoning_content": f"I should look.\n\n{JSON_CALL}",
    },
    "another spelling of the name": {
        "content": None,
        "reasoning": "I should look.",
        "tool_calls": [call("functions.get_weather<|channel|>commentary", PARIS)],
    },
    "arguments as an object": {
        "content": None,
        "reasoning_details": [{"type": "reasoning.text", "text": "I should look."}],
        "tool_calls": [call("get_weather", {"city": "Paris"})],
    },
    "a thought in the arguments": {
        "content": None,
        "reasoning": "I should look.",
        "tool_calls": [call("get_weather", f"Oops, typo? {PARIS}")],
    },
    "an argument of another type": {
        "content": None,
        "reasoning": "I should look.",
        "tool_calls": [call("get_weather", '{"city": "Paris", "days": "2"}')],
    },
    "no id": {
        "content": "",
        "reasoning": "I should look.",
        "tool_calls": [call("get_weather", PARIS, id="")],
    },
}

REPORTED = {
    "a call in the content",
    "a fenced call",
    "a call at the end of the thoughts",
    "another spelling of the name",
    "a thought in the arguments",
}
"""What is a repair. The others are another server's way to say the same."""


def options(family: str = "gpt_oss") -> ReadingOptions:
    return reading_options({"tools": [WEATHER]}, family)


def read(body: Wire, family: str = "gpt_oss") -> Wire:
    return read_completion(body, options(family))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_found_wherever_it_was_put(name: str) -> None:
    found = read(completion(**CALLS[name]))
    [choice] = found["choices"]
    [made] = choice["message"]["tool_calls"]
    assert made["function"]["name"] == "get_weather"
    wanted = '{"city": "Paris", "days": 2}' if "another type" in name else PARIS
    assert made["function"]["arguments"] == wanted
    assert made["id"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"].startswith("I should look.")
    if name in REPORTED:
        assert found["mlx_server"]["repairs"]


@pytest.mark.parametrize("name", CALLS)
def test_a_stream_reads_as_the_whole_message(name: str) -> None:
    message = completion(**CALLS[name])["choices"][0]["message"]
    pieces = [{"content": letter} for letter in message.pop("content") or ""]
    reader = ForeignStreamReader(options())
    found = [made for chunk in chunks(message, *pieces) for made in reader.feed(chunk)]
    reader.end()
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
    calls = [each["function"] for delta in deltas for each in delta.get("tool_calls", ())]
    assert "".join(each.get("name", "") for each in calls) == "get_weather"
    assert "".join(each.get("arguments", "") for each in calls).startswith('{"city": "Paris"')
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert bool(found[-1].get("mlx_server")) >= (name in REPORTED)


def test_thoughts_leave_the_text() -> None:
    found = read(completion("<think>Paris?</think>\n\nIt rains."), "plain")
    message = found["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("It rains.", "Paris?")


def test_an_answer_without_fault_stays_as_it_is() -> None:
    plain = completion("It rains.")
    assert read(plain) == plain


def test_a_call_that_can_not_be_made_is_text_and_reported() -> None:
    broken = completion(None, tool_calls=[call("launch", "{}"), call("get_weather", "Paris")])
    found = read(broken)
    assert found["choices"][0]["message"]["content"] == (
        '{"name": "launch", "arguments": "{}"}\n{"name": "get_weather", "arguments": "Paris"}'
    )
    assert found["choices"][0]["finish_reason"] == "stop"
    assert len(found["mlx_server"]["unmet"]) == 2


def test_a_call_that_was_not_to_be_made_is_text() -> None:
    offered = {"tools": [WEATHER], "tool_choice": "none"}
    found = read_completion(completion(JSON_CALL), reading_options(offered, "gpt_oss"))
    assert found["choices"][0]["message"]["content"] == JSON_CALL


def test_calls_of_the_text_and_of_the_message_are_numbered_together() -> None:
    both = completion(
        f"<tool_call>\n{JSON_CALL}\n</tool_call>",
        tool_calls=[call("get_weather", PARIS), call("get_weather", ROME)],
    )
    reader = ForeignStreamReader(options("qwen3"))
    [choice] = both["choices"]
    found = [made for chunk in chunks(choice["message"]) for made in reader.feed(chunk)]
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
    named = [each for delta in deltas for each in delta.get("tool_calls", ()) if "id" in each]
    assert [each["index"] for each in named] == [0, 1]
    assert len({each["id"] for each in named}) == 2


@pytest.mark.parametrize(
    "broken",
    [
        {"choices": None},
        {"choices": [{"message": None, "finish_reason": None}]},
    ],
)
def test_what_a_server_leaves_empty_or_nests_is_no_crash(broken: Wire) -> None:
    assert isinstance(read(broken)["choices"], list)
    assert isinstance(ForeignStreamReader(options()).feed(as_chunk(broken)), list)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": None, "tool_calls": [5, {"function": 1}]}, "a call that is not an object"),
        ({"content": [{"text": "deep"}]}, "a `content` that is not text"),
    ],
)
def test_what_is_no_message_is_an_error_that_says_so(message: Wire, why: str) -> None:
    broken: Wire = {"choices": [{"message": message}], "mlx_server": 1}
    with pytest.raises(UpstreamFailed, match=why):
        read(broken)
    with pytest.raises(UpstreamFailed, match=why):
        ForeignStreamReader(options()).feed(as_chunk(broken))


def as_chunk(body: Wire) -> Wire:
    return {
        "choices": [{**each, "delta": each["message"]} for each in body["choices"] or () if each]
    }


def test_a_stream_has_its_usage_once() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    reader = ForeignStreamReader(options())
    *begun, last = chunks({"content": "It "}, {"content": "rains."})
    found = [made for chunk in [*begun, {**last, "usage": usage}] for made in reader.feed(chunk)]
    assert [each["usage"] for each in found if each.get("usage")] == [usage]
    assert not any("mlx_server" in each for each in found)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_stream_that_was_cut_off_is_an_error(length: int) -> None:
    reader = ForeignStreamReader(options())
    for chunk in chunks({"content": "It "}, {"content": "rains."})[:length]:
        reader.feed(chunk)
    with pytest.raises(GenerationFailed, match="before the answer did"):
        reader.end()


def test_the_reports_of_our_own_server_stay() -> None:
    earlier = {"repairs": [{"index": 0, "what": "json", "where": "content"}], "unenforced": ["a"]}
    found = read({**completion(JSON_CALL), "mlx_server": earlier})
    assert [each["what"] for each in found["mlx_server"]["repairs"]] == ["json", "unmarked"]
    assert found["mlx_server"]["unenforced"] == ["a"]


@pytest.mark.slow
def test_the_clients_need_neither_mlx_nor_a_web_framework() -> None:
    code = (
        "import sys\n"
        "import mlx_server.clients.providers, mlx_server.clients.watsonx\n"
        "unwanted = {'mlx', 'mlx_lm', 'fastapi', 'starlette', 'uvicorn', 'llguidance', 'torch'}\n"
        "print(sorted(unwanted & set(sys.modules)))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert printed.stdout.split() == ["[]"]


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


def test_an_exchange_runs_the_same_where_it_is_awaited() -> None:
    answers = [completion(None), completion("Five.")]

    async def send(body: Wire) -> Wire:
        return answers.pop(0)

    answer = asyncio.run(arun(checked_answer({"messages": ASKED}, "gpt_oss"), send))
    assert content(answer) == "Five."
