"""Calls of a message, in whatever field and form they come."""

import json

from starlette.testclient import TestClient

from tests.upstream.playing import AnswerReader, PlayingServer, delta
from tests.upstream.quirks import PARIS, PARIS_JSON, Quirk, calls, check, reads

QUIRKS = (
    *(
        Quirk(f"a call as {list(said)}", (said,), **calls(PARIS))
        for function in [{"name": "get_weather", "arguments": PARIS_JSON}]
        for said in (
            {"toolCalls": [{"function": function}]},
            {"tool_call": {"function": function}},
            {"tool_calls": json.dumps([{"function": function}])},
            {"tool_calls": [None, {"function": json.dumps(function)}]},
            {"tool_calls": {"0": {"tool_name": "get_weather", "tool_input": {"city": "Paris"}}}},
            {"choices": [{"delta": {}, "tool_calls": [{"function": function}]}]},
        )
    ),
    Quirk(
        "the older function_call",
        ({"function_call": {"name": "get_weather", "arguments": PARIS_JSON}},),
        **calls(PARIS),
    ),
    Quirk("a call of nothing", ({"tool_calls": [{"function": None}]}, {"content": "Y"}), text="Y"),
    Quirk(
        "a custom call",
        ({"tool_calls": [{"custom": {"name": "get_weather", "input": PARIS_JSON}}]},),
        **calls(PARIS),
    ),
    Quirk(
        "the older function_call in pieces",
        (
            {"function_call": {"name": "get_weather", "arguments": ""}},
            {"function_call": {"arguments": '{"city": '}},
            {"function_call": {"arguments": '"Paris"}'}},
        ),
        **calls(PARIS),
        ends=delta("function_call"),
    ),
)


@reads(*QUIRKS)
def test_it_reads(
    quirk: Quirk, read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    check(quirk, read_answer, clients, upstream)
