"""What servers get wrong in the messages of gpt-oss and others, and what clients make of it."""

import subprocess
import sys
from typing import Any

import pytest

from mlx_server.clients.foreign_answers import (
    ForeignStreamReader,
    read_completion,
    reading_options,
)
from mlx_server.errors import GenerationFailed, UpstreamFailed
from mlx_server.upstream.reading_options import ReadingOptions
from tests.clients.recorded import WEATHER, Wire, call, chunks, completion

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
    "the older form": {
        "content": None,
        "reasoning": "I should look.",
        "function_call": {"name": "get_weather", "arguments": PARIS},
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
        {"choices": [None]},
        {"choices": [{"message": None, "finish_reason": None}]},
        {"choices": [{"message": {"content": [{"text": ["deep"]}, 5], "reasoning": {}}}]},
    ],
)
def test_what_a_server_leaves_empty_or_nests_is_no_crash(broken: Wire) -> None:
    assert isinstance(read(broken)["choices"], list)
    assert isinstance(ForeignStreamReader(options()).feed(as_chunk(broken)), list)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": None, "tool_calls": [5, {"function": 1}]}, "a call that is not an object"),
        ({"content": True, "tool_calls": "none"}, "a `content` that is not text"),
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


def test_the_clients_need_neither_mlx_nor_a_web_framework() -> None:
    code = (
        "import sys\n"
        "import mlx_server.clients.providers, mlx_server.clients.watsonx.model_inference\n"
        "unwanted = {'mlx', 'mlx_lm', 'fastapi', 'starlette', 'uvicorn', 'llguidance', 'torch'}\n"
        "print(sorted(unwanted & set(sys.modules)))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert printed.stdout.split() == ["[]"]
