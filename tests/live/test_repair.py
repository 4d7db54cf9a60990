"""Answers that no grammar held to all that was asked: mended, or made once more."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.live.chats import answer_of
from tests.live.common import Models, common_models, transcript
from tests.live.server import LiveServer

QUESTION = "Three numbers"
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "numbers",
        "strict": False,
        "schema": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    },
}
REPEATED = [{"index": 0, "what": "$: [1, 1] has non-unique elements"}]
TOWN = "A town"
LONG = '{"the_name_of_the_town": "Rome"}'
LIMIT = 20
"""Fewer tokens than even an empty name takes; a token is a byte."""
CONTEXT = 200


def named(key: str, *, strict: bool = True) -> Any:
    """Of a schema that asks for this and nothing else."""
    schema = {
        "type": "object",
        "properties": {key: {"type": "string"}},
        "required": [key],
        "additionalProperties": False,
        **({} if strict else {"if": {"minProperties": 2}, "then": False}),
    }
    wanted = {"name": "a", "strict": strict, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


REPORTED = named("the_name_of_the_town")
LOOSE = named("the_name_of_the_town", strict=False)
LONGER = named("the_name_of_the_town_" + "and_of_its_river_" * 2)

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

WEATHER: Any = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
BROKEN_CALL = '<tool_call>{"name": "weather", "arguments": {"days": "two"}}</tool_call>'
WHOLE_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>'
TORN_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", and so on.</tool_call>'
BROKEN = [
    {"index": 0, "what": "tool_calls[0].function.arguments.city: it is required"},
    {"index": 0, "what": "tool_calls[0].function.arguments.days: it should be of type integer"},
]

SENTENCE = "I said it once. I say it again. "

SAID = [
    {"match": QUESTION, "output": "<think>\nEasy.\n</think>\n\n[1, 1]"},
    {"match": "Thought", "output": "<think>\nIt is 4.\n</think>\n\n"},
    {"match": "Call", "output": f"<think>\nI call.\n{CALL}\n</think>\n\n"},
    {"match": "Weather", "output": BROKEN_CALL},
    {"match": "Whole", "output": WHOLE_CALL},
    {"match": "Torn", "output": TORN_CALL},
    {"match": TOWN, "output": LONG, "off_grammar": "noise"},
    {"match": "regex:^Any town", "output": LONG},
    {"match": "Think of a town", "output": "<think>\n" + "Rome? " * 9 + "\n</think>\n\n" + LONG},
    {"match": "Loop", "output": "<think>\nHm.\n</think>\n\n" + SENTENCE * 60},
    {"match": "Circle", "output": "<think>\n" + SENTENCE * 60},
    # by the model that gets the error of that
    {"match": "regex:unique", "output": "<think>\nOnce more.\n</think>\n\n[1, 2]"},
]


@common_models
def models(folder: Path, _: object) -> Models:
    transcript(folder / "said.jsonl", SAID)
    transcript(folder / "insists.jsonl", [{"output": SAID[0]["output"]}])
    model = {"source": "replay:said.jsonl", "family": "qwen3"}
    short = {**model, "defaults": {"max_tokens": LIMIT}}
    return {
        "live": model,
        "free": {**model, "constrain_calls": False},
        "stubborn": {**model, "source": "replay:insists.jsonl"},
        "once": {**model, "repair": {"retries": 0}},
        "as written": {**model, "repair": {"mistakes": False}},
        "patient": {**model, "repair": {"loops": "off"}},
        "short": short,
        "short_narrow": {**short, "context_length": CONTEXT},
    }


def asked(client: OpenAI, model: str, question: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=model, messages=messages, **more)


def repairs(body: Any) -> list[tuple[str, str]]:
    reported = (body.model_extra or {}).get("mlx_server", {"repairs": []})
    return [(repair["what"], repair["where"]) for repair in reported["repairs"]]


def unmet(body: Any) -> list[Any]:
    reported: list[Any] = (body.model_extra or {}).get("mlx_server", {}).get("unmet", [])
    return reported


def streamed(client: OpenAI, model: str, **more: Any) -> tuple[str, str, list[tuple[str, str]]]:
    chunks = list(asked(client, model, QUESTION, stream=True, **more))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    reasoning = "".join((d.model_extra or {}).get("reasoning", "") for d in deltas)
    return reasoning, "".join(d.content or "" for d in deltas), repairs(chunks[-1])


def test_an_answer_that_breaks_its_schema_is_made_once_more(client: OpenAI) -> None:
    body = asked(client, "live", QUESTION, response_format=FORMAT)
    message = body.choices[0].message
    assert message.content == "[1, 2]"
    assert message.reasoning == "Once more."
    assert repairs(body) == [("schema", "content")]
    assert unmet(body) == []
    assert body.model_extra["mlx_server"]["unenforced"] == ["uniqueItems at #"]
    # both attempts cost what they cost
    alone = asked(client, "once", QUESTION, response_format=FORMAT)
    assert body.usage.completion_tokens > alone.usage.completion_tokens


def test_where_nobody_allows_it_the_answer_is_told_as_it_is(client: OpenAI) -> None:
    body = asked(client, "once", QUESTION, response_format=FORMAT)
    assert body.choices[0].message.content == "[1, 1]"
    assert repairs(body) == []
    assert unmet(body) == REPEATED


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fails_again_says_so(client: OpenAI, stream: bool) -> None:
    found = asked(client, "stubborn", QUESTION, response_format=FORMAT, stream=stream)
    last = list(found)[-1] if stream else found
    assert (repairs(last), unmet(last)) == ([], REPEATED)


def test_what_was_streamed_is_not_made_again(client: OpenAI) -> None:
    assert streamed(client, "live", response_format=FORMAT) == ("Easy.", "[1, 1]", [])
    *_, last = asked(client, "live", QUESTION, response_format=FORMAT, stream=True)
    assert unmet(last) == REPEATED


def test_a_call_in_reasoning_is_made_and_is_never_the_text(client: OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    offered, alone = asked(client, "live", "Call", tools=tools), asked(client, "live", "Call")
    (call,) = offered.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", "{}")
    assert offered.choices[0].finish_reason == "tool_calls"
    assert repairs(offered) == [("reasoning", "tool_calls[0]")]
    assert not alone.choices[0].message.content
    assert repairs(alone) == []
    for body in (offered, alone):
        assert body.choices[0].message.reasoning == f"I call.\n{CALL}"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_the_answer_where_there_is_no_other(client: OpenAI, stream: bool) -> None:
    if stream:
        chunks = list(asked(client, "live", "Thought", stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        mended = repairs(chunks[-1])
    else:
        body = asked(client, "live", "Thought")
        text, mended = body.choices[0].message.content, repairs(body)
    assert (text, mended) == ("It is 4.", [("reasoning", "content")])


def test_unless_its_owner_does_not_want_that(client: OpenAI) -> None:
    body = asked(client, "as written", "Thought")
    assert body.choices[0].message.content == ""
    assert repairs(body) == []


def ends(client: OpenAI, model: str, question: str, stream: bool, **more: Any) -> tuple[Any, ...]:
    """An answer's text, why it is over, its tokens and what was mended."""
    if not stream:
        body = asked(client, model, question, **more)
        (choice,) = body.choices
        text, tokens = choice.message.content or "", body.usage.completion_tokens
        return text, choice.finish_reason, tokens, repairs(body)
    more["stream_options"] = {"include_usage": True}
    chunks = list(asked(client, model, question, stream=True, **more))
    *deltas, last, usage = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in deltas)
    return text, last.choices[0].finish_reason, usage.usage.completion_tokens, repairs(last)


both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])

CUT = [("cut", "content")]


@both_ways
@pytest.mark.parametrize(
    "more",
    [REPORTED, LOOSE],
    ids=["strict", "not strict"],
)
def test_json_that_a_limit_cuts_short_goes_on(
    server: LiveServer, client: OpenAI, more: Any, stream: bool
) -> None:
    before = server.counted("mlx_server_repairs_total", "short", what="cut")
    found = ends(client, "short", TOWN, stream, **more)
    assert found == (LONG, "stop", len(LONG) + 1, CUT)
    assert server.counted("mlx_server_repairs_total", "short", what="cut") == before + 1


@both_ways
@pytest.mark.parametrize(
    ("model", "question", "more", "tokens"),
    [
        ("short", TOWN, LONGER, 2 * LIMIT),
        ("short", TOWN, {}, LIMIT),
        ("short", "Think of a town", REPORTED, LIMIT),
        ("short", TOWN, {**REPORTED, "max_tokens": LIMIT}, LIMIT),
        ("short", TOWN, {**REPORTED, "extra_body": {"max_response_tokens": LIMIT + 5}}, LIMIT + 5),
        ("live", TOWN, {**REPORTED, "max_tokens": LIMIT}, LIMIT),
    ],
    ids=[
        *("cut again", "no JSON", "only reasoning"),
        *("the client's limit", "the client's limit of the answer", "no other limit"),
    ],
)
def test_what_is_cut_short_for_good(
    client: OpenAI, model: str, question: str, more: Any, tokens: int, stream: bool
) -> None:
    text, reason, used, mended = ends(client, model, question, stream, **more)
    assert (reason, used, mended) == ("length", tokens, [])
    assert len(text) <= tokens
    with pytest.raises(ValueError, match="line 1"):
        json.loads(text)


def test_what_a_call_breaks_of_its_tools_schema_is_reported(
    client: OpenAI, server: LiveServer
) -> None:
    tools: Any = [{"type": "function", "function": WEATHER}]
    body = asked(client, "free", "Weather", tools=tools)
    (call,) = body.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"days": "two"}
    assert unmet(body) == BROKEN
    *_, last = asked(client, "free", "Weather", tools=tools, stream=True)
    assert unmet(last) == BROKEN
    functions: Any = [{"type": "function", **WEATHER}]
    response: Any = client.responses.create(model="free", input="Weather", tools=functions)
    assert response.mlx_server["unmet"] == BROKEN
    question = {"model": "free", "messages": [{"role": "user", "content": "Weather"}]}
    with server.http() as http:
        native = http.post("/generate", json={**question, "tools": [WEATHER]}).json()
    assert native["mlx_server"]["unmet"] == BROKEN


def streamed_calls(client: OpenAI, model: str, question: str, **more: Any) -> tuple[str, str]:
    """The names and arguments of the calls in a stream, and its text."""
    tools: Any = [{"type": "function", "function": WEATHER}]
    answer = answer_of(asked(client, model, question, tools=tools, stream=True, **more))
    return "".join(name + arguments for name, arguments in answer.calls), answer.text


def test_a_stream_shows_no_call_that_breaks_later(client: OpenAI) -> None:
    assert streamed_calls(client, "free", "Torn") == ("", TORN_CALL)


def test_a_call_streams(client: OpenAI) -> None:
    calls, text = streamed_calls(client, "live", "Whole")
    assert (calls, text) == ('weather{"city": "Oslo", "days": 2}', "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("question", "field", "place"),
    [("Loop", "content", "content"), ("Circle", "reasoning", "reasoning_content")],
)
def test_a_loop_is_ended_and_reported(
    client: OpenAI, question: str, field: str, place: str, stream: bool
) -> None:
    """After six times 256 tokens, which here are bytes."""
    answer = asked(client, "live", question, stream=stream)
    chunks = list(answer) if stream else [answer]
    parts = [choice.delta if stream else choice.message for c in chunks for choice in c.choices]
    text = "".join(getattr(part, field, None) or "" for part in parts)
    assert SENTENCE * 40 < text < SENTENCE * 50
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "stop"
    what = f"{place}: it repeated the same {len(SENTENCE)} tokens, so it was ended"
    assert unmet(chunks[-1]) == [{"index": 0, "what": what}]


def test_a_model_may_loop_where_its_owner_lets_it(client: OpenAI) -> None:
    body = asked(client, "patient", "Loop")
    assert body.choices[0].message.content == SENTENCE * 60
    assert unmet(body) == []
