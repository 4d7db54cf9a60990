"""Answers of other servers: parsed as the server's own upstreams are, repaired, checked, requested
again, with a thinking budget and with tools in the prompt."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from mlx_server.clients.exchange import Exchange, Wire, run
from mlx_server.clients.gateway import Gateway
from mlx_server.errors import BadRequest, GenerationFailed, UpstreamFailed
from tests.clients.recorded import WEATHER, call, chunks, completion

ASKED = [{"role": "user", "content": "How old is he?"}]
CHAT: Wire = {"messages": ASKED}
PARIS = '{"city": "Paris"}'
JSON_CALL = f'{{"name": "get_weather", "arguments": {PARIS}}}'
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
OSS = Gateway("gpt_oss")


def played(exchange: Exchange, *answers: Wire) -> tuple[Wire, list[Wire]]:
    """The last answer, and the bodies that were sent."""
    left, bodies = list(answers), list[Wire]()

    def send(body: Wire) -> Wire:
        bodies.append(body)
        return left.pop(0)

    answer = run(exchange, send)
    assert left == []
    return answer, bodies


def read(answer: Wire, gateway: Gateway = OSS, **asked: Any) -> Wire:
    once = replace(gateway, repair=replace(gateway.repair, retries=0))
    return played(once.ask({**CHAT, "tools": [WEATHER], **asked}), answer)[0]


def streamed(*received: Wire, gateway: Gateway = OSS, **asked: Any) -> list[Wire]:
    reader = gateway.stream({**CHAT, "tools": [WEATHER], **asked})
    found = [made for chunk in received for made in reader.feed(chunk)]
    reader.end()
    return found


def content(answer: Wire) -> Any:
    return answer["choices"][0]["message"]["content"]


def roles(body: Wire) -> list[str]:
    return [message["role"] for message in body["messages"]]


def test_a_call_that_can_not_be_made_is_text_and_reported() -> None:
    broken = completion(None, tool_calls=[call("launch", "{}"), call("get_weather", "Paris")])
    found = read(broken)
    assert content(found) == (
        '{"name": "launch", "arguments": "{}"}\n{"name": "get_weather", "arguments": "Paris"}'
    )
    assert len(found["mlx_server"]["unmet"]) == 2
    assert content(read(completion(JSON_CALL), tool_choice="none")) == JSON_CALL


def test_what_a_server_leaves_empty_or_nests_is_no_crash() -> None:
    for broken in ({"choices": None}, {"choices": [{"message": None, "finish_reason": None}]}):
        assert isinstance(read(broken)["choices"], list)
    reader = OSS.stream(CHAT)
    for index in (-5, 10**9, "x"):
        reader.feed({"choices": [{"index": index, "delta": {"content": "Yes"}}]})
    for message, why in (
        ({"content": None, "tool_calls": [5, {"function": 1}]}, "a call that is not an object"),
        ({"content": {"text": "deep"}}, "a `content` that is not text"),
    ):
        with pytest.raises(UpstreamFailed, match=why):
            read({"choices": [{"message": message}], "mlx_server": 1})
        with pytest.raises(UpstreamFailed, match=why):
            streamed({"choices": [{"delta": message}]})


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_stream_that_was_cut_off_is_an_error(length: int) -> None:
    with pytest.raises(GenerationFailed, match="before the answer did"):
        streamed(*chunks({"content": "It "}, {"content": "rains."})[:length])


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


def test_a_schema_is_described_checked_and_asked_for_again() -> None:
    wrong, right = completion('{"age": "old"}'), completion('{"age": 5}')
    answer, bodies = played(OSS.ask({**CHAT, "response_format": FORMAT}), wrong, right)
    assert content(answer) == '{"age": 5}'
    assert '"integer"' in bodies[0]["messages"][0]["content"]
    assert roles(bodies[1]) == ["system", "user", "assistant", "user"]
    assert "age" in bodies[1]["messages"][-1]["content"]
    assert bodies[1]["messages"][0] == bodies[0]["messages"][0]
    assert [each["what"] for each in answer["mlx_server"]["repairs"]] == ["schema"]
    found = read(completion("Five."), response_format=FORMAT)
    assert content(found) == "Five."
    assert found["mlx_server"]["unmet"]


def test_a_required_call_is_asked_for_again_and_an_answer_that_was_cut_off_is_not() -> None:
    body = {**CHAT, "tools": [WEATHER], "tool_choice": "required"}
    made = completion(None, tool_calls=[call("get_weather", PARIS)])
    answer, _ = played(OSS.ask(body), completion("It rains."), made)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    answer, _ = played(OSS.ask(body), completion("It ra", reason="length"))
    assert content(answer) == "It ra"


LIMITED = Gateway("qwen3", thinking_tokens=8)


def test_thoughts_have_a_limit_and_the_second_request_may_call_a_tool() -> None:
    body = {**CHAT, "tools": [WEATHER], "max_tokens": 58, "stop": "END"}
    thought = completion("<think>\nParis, or", reason="length")
    made = completion(None, tool_calls=[call("get_weather", PARIS)])
    answer, (first, second) = played(LIMITED.ask(body), thought, made)
    assert (first["max_tokens"], first["stop"]) == (8, ["END", "</think>"])
    assert (second["max_tokens"], second["stop"]) == (50, ["END"])
    assert second["messages"][-1]["content"] == "<think>\nParis, or\n</think>\n\n"
    assert second["continue_final_message"]
    assert second["tools"] == first["tools"] == [WEATHER]
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"].strip() == "Paris, or"
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["get_weather"]
    assert answer["usage"] == {
        "prompt_tokens": 14,
        "completion_tokens": 10,
        "total_tokens": 24,
        "completion_tokens_details": {"reasoning_tokens": 5},
    }


def test_a_model_without_tags_can_not_have_two_requests() -> None:
    with pytest.raises(BadRequest, match="no tags around their reasoning"):
        played(Gateway("gpt_oss", thinking_tokens=8).ask(CHAT))


@pytest.mark.parametrize("has_parts", [False, True])
def test_tools_calls_and_results_become_text_for_a_server_without_tools(has_parts: bool) -> None:
    def said(text: str) -> Any:
        return [{"type": "text", "text": text}] if has_parts else text

    def text(message: Wire) -> str:
        found = message["content"]
        return "".join(part["text"] for part in found) if has_parts else found

    messages: list[Wire] = [
        {"role": "system", "content": said("Be brief.")},
        {"role": "assistant", "content": said("Hm."), "tool_calls": [call("get_weather", "{}")]},
        {"role": "tool", "tool_call_id": "call_1", "content": said("Rain.")},
    ]
    named = {"type": "function", "function": {"name": "get_weather"}}
    hermes = replace(OSS, tools_in_prompt=True)
    made = hermes.described({"messages": messages, "tools": [WEATHER], "tool_choice": named})
    assert set(made) == {"messages"}
    system, assistant, result = made["messages"]
    assert text(system).startswith("Be brief.\n\n# Tools")
    assert "get_weather now" in text(system)
    written = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    assert text(assistant) == f"Hm.\n{written}"
    assert (result["role"], text(result)) == ("user", "<tool_response>\nRain.\n</tool_response>")
    assert hermes.described({"messages": messages}) == {"messages": messages}
