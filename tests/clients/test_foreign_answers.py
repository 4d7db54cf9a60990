"""What servers get wrong in the messages of gpt-oss and others, and what clients make of it."""

from typing import Any

import pytest

from mlx_server.clients.foreign_answers import ForeignStreamReader, read_completion
from tests.clients.recorded import WEATHER, call, chunks, completion

PARIS = '{"city": "Paris"}'
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


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_found_wherever_it_was_put(name: str) -> None:
    read = read_completion(completion(**CALLS[name]), "gpt_oss", [WEATHER])
    [choice] = read["choices"]
    [made] = choice["message"]["tool_calls"]
    assert made["function"]["name"] == "get_weather"
    wanted = '{"city": "Paris", "days": 2}' if "another type" in name else PARIS
    assert made["function"]["arguments"] == wanted
    assert made["id"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"].startswith("I should look.")
    if name in REPORTED:
        assert read["mlx_server"]["repairs"]


@pytest.mark.parametrize("name", CALLS)
def test_a_stream_reads_as_the_whole_message(name: str) -> None:
    message = completion(**CALLS[name])["choices"][0]["message"]
    pieces = [{"content": letter} for letter in message.pop("content") or ""]
    reader = ForeignStreamReader("gpt_oss", [WEATHER])
    found = [made for chunk in chunks(message, *pieces) for made in reader.feed(chunk)]
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
    calls = [each["function"] for delta in deltas for each in delta.get("tool_calls", ())]
    assert "".join(each.get("name", "") for each in calls) == "get_weather"
    assert "".join(each.get("arguments", "") for each in calls).startswith('{"city": "Paris"')
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert bool(found[-1].get("mlx_server")) >= (name in REPORTED)


def test_thoughts_leave_the_text() -> None:
    read = read_completion(completion("<think>Paris?</think>\n\nIt rains."), "plain")
    message = read["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("It rains.", "Paris?")


def test_an_answer_without_fault_stays_as_it_is() -> None:
    plain = completion("It rains.")
    assert read_completion(plain, "gpt_oss", [WEATHER]) == plain


def test_a_call_that_can_not_be_made_is_text_and_reported() -> None:
    broken = completion(None, tool_calls=[call("launch", "{}"), call("get_weather", "Paris")])
    read = read_completion(broken, "gpt_oss", [WEATHER])
    assert read["choices"][0]["message"]["content"] == "launch({})get_weather(Paris)"
    assert read["choices"][0]["finish_reason"] == "stop"
    assert len(read["mlx_server"]["unmet"]) == 2


def test_calls_of_the_text_and_of_the_message_are_numbered_together() -> None:
    both = completion(
        f"<tool_call>\n{JSON_CALL}\n</tool_call>", tool_calls=[call("get_weather", PARIS)]
    )
    reader = ForeignStreamReader("qwen3", [WEATHER])
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
        {"choices": [{"message": {"content": None, "tool_calls": [None, {"function": 1}]}}]},
        {"choices": [{"message": {"content": [{"text": ["deep"]}, 5], "reasoning": {}}}]},
        {"choices": [{"message": {"content": 5, "tool_calls": "none"}}], "mlx_server": 1},
    ],
)
def test_whatever_a_server_sends_is_no_crash(broken: dict[str, Any]) -> None:
    assert isinstance(read_completion(broken, "gpt_oss", [WEATHER])["choices"], list)
    reader = ForeignStreamReader("gpt_oss", [WEATHER])
    as_chunk = [{**each, "delta": each["message"]} for each in broken["choices"] or () if each]
    assert isinstance(reader.feed({"choices": as_chunk}), list)


def test_the_reports_of_our_own_server_stay() -> None:
    earlier = {"repairs": [{"index": 0, "what": "json", "where": "content"}], "unenforced": ["a"]}
    read = read_completion({**completion(JSON_CALL), "mlx_server": earlier}, "gpt_oss", [WEATHER])
    assert [each["what"] for each in read["mlx_server"]["repairs"]] == ["json", "unmarked"]
    assert read["mlx_server"]["unenforced"] == ["a"]
