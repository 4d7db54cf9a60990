"""Calls whose pieces, names and arguments are not as they should be."""

import json

import pytest
from starlette.testclient import TestClient

from tests.upstream.playing import (
    USAGE,
    AnswerReader,
    PlayingServer,
    as_response,
    delta,
    in_chunks,
    in_one,
    whole,
)
from tests.upstream.quirks import (
    CALL_JSON,
    NOW,
    PARIS,
    PARIS_JSON,
    ROME,
    TIME,
    WEATHER,
    Quirk,
    call,
    calls,
    check,
    indexed,
    reads,
)

QUIRKS = (
    Quirk("a call as it should be", (call(PARIS_JSON),), **calls(PARIS)),
    Quirk(
        "the name after the arguments",
        (indexed(0, arguments=PARIS_JSON), indexed(0, "a", name="get_weather")),
        **calls(PARIS),
    ),
    *(
        Quirk(
            f"arguments {what}", (call(made),), **calls(PARIS), repairs=(f"{kind} tool_calls[0]",)
        )
        for what, made, kind in (
            ("that are the whole call", CALL_JSON, "format"),
            ("without their braces", '"city": "Paris"', "json"),
            ("in a list", f"[{PARIS_JSON}]", "format"),
            ("as a text in a text in a text", json.dumps(json.dumps(PARIS_JSON)), "json"),
        )
    ),
    Quirk(
        "a call in pieces",
        (
            call("", name="get_weather"),
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
            {"tool_calls": [{"index": 0, "function": {"name": None, "arguments": '"Paris"}'}}]},
        ),
        **calls(PARIS),
    ),
    Quirk("arguments as an object", (call({"city": "Paris"}),), **calls(PARIS)),
    Quirk(
        "arguments as a text in a text",
        (call('"{\\"city\\": \\"Paris\\"}"'),),
        **calls(PARIS),
        repairs=("json tool_calls[0]",),
    ),
    Quirk(
        "arguments with a slip",
        (call("{'city': 'Paris',}"),),
        **calls(PARIS),
        repairs=("json tool_calls[0]",),
    ),
    Quirk(
        "thinking before the arguments",
        (call(f"Oops, typo? {PARIS_JSON}"),),
        **calls(PARIS),
        repairs=("fences tool_calls[0]",),
    ),
    Quirk(
        "several objects as one call's arguments",
        (call(f'{PARIS_JSON}{{"city": "Rome"}}'),),
        **calls(PARIS, ROME),
        repairs=("format tool_calls[0]", "format tool_calls[1]"),
    ),
    Quirk(
        "arguments of the wrong type",
        (call('{"city": "Paris", "days": "3"}'),),
        **calls({"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}),
        repairs=("type tool_calls[0].function.arguments.days",),
    ),
    Quirk(
        "control tokens in the name",
        (call(PARIS_JSON, name="get_weather<|channel|>commentary"),),
        **calls(PARIS),
        repairs=("name tool_calls[0].function.name",),
    ),
    Quirk(
        "a header in place of the name",
        (call(PARIS_JSON, name="assistant<|channel|>analysis"),),
        **calls(PARIS),
        repairs=("name tool_calls[0]",),
    ),
    Quirk(
        "no id and no index",
        ({"tool_calls": [{"function": {"name": "get_weather", "arguments": PARIS_JSON}}]},),
        **calls(PARIS),
    ),
    Quirk(
        "one index for all calls",
        (call(PARIS_JSON), call('{"city": "Rome"}', id="call_2")),
        **calls(PARIS, ROME),
    ),
    *(
        Quirk(
            f"an index that is {what}",
            (
                indexed(first, id="a", name="get_weather"),
                indexed(second, id="b", name="get_time"),
                indexed(first, arguments=PARIS_JSON),
                indexed(second, arguments="{}"),
            ),
            **calls(PARIS, NOW),
        )
        for what, first, second in (
            ("huge", 10**9, 10**12),
            ("negative", -1, -2),
            ("out of order", 7, 2),
        )
    ),
    Quirk(
        "arguments that are a list",
        (call([1]),),
        text='{"name": "get_weather", "arguments": "[1]"}',
        unmet=("tool_calls[0]: what the upstream sent as a call can't be made, so it is text",),
    ),
    *(
        Quirk(
            f"calls without an index, {what}",
            (
                indexed(None, ids[0], name="get_weather", arguments=PARIS_JSON),
                indexed(None, ids[1], name="get_time", arguments="{}"),
            ),
            **calls(PARIS, NOW),
        )
        for what, ids in (("with ids", ("a", "b")), ("nor an id", (None, None)))
    ),
    Quirk(
        "arguments with the reason",
        (indexed(1, "a", name="get_weather", arguments='{"city": '),),
        **calls(PARIS),
        ends=delta("tool_calls", **indexed(1, arguments='"Paris"}')),
    ),
    Quirk(
        "the name and the id in each piece",
        tuple(
            indexed(0, "a", name="get_weather", arguments=piece)
            for piece in ('{"city"', ': "Pa', 'ris"}')
        ),
        **calls(PARIS),
    ),
    Quirk(
        "the id in each piece and no index",
        (
            indexed(None, "a", name="get_weather"),
            indexed(None, "a", arguments='{"city": '),
            indexed(None, "a", arguments='"Paris"}'),
        ),
        **calls(PARIS),
    ),
    Quirk("a call of nothing", ({"tool_calls": [{"function": None}]}, {"content": "Y"}), text="Y"),
)


@pytest.mark.slow
@reads(*QUIRKS)
def test_it_reads(
    quirk: Quirk, read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    check(quirk, read_answer, clients, upstream)


@pytest.mark.parametrize("read_answer", [in_one, in_chunks, as_response])
def test_the_calls_of_a_whole_message_stand_alone_however_they_are_numbered(
    read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    made = [call(PARIS_JSON), call('{"x": 1}', name="launch")]
    message = {"content": None, "tool_calls": [each["tool_calls"][0] for each in made]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    upstream.plays(whole({"choices": [choice], "usage": USAGE["usage"]}))
    found = read_answer(clients["gpt_oss"], {"tools": [WEATHER, TIME]})
    assert found["calls"] == [PARIS]
    assert found["text"].startswith('{"name": "launch"')
    assert len(found["unmet"]) == 1
