"""gpt-oss's answers as responses, and back again: through the whole app, with an engine that plays
what is written here.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai_harmony import Message, TextContent
from starlette.testclient import TestClient

from mlx_server.app import create_app
from mlx_server.config.settings import ModelSettings, Settings
from tests.api.responses.harmony_outputs import CUT, FUNCTION, OTHER, OUTPUTS, PATH, SECOND_STEP
from tests.api.responses_schema import Json, assert_response, assert_stream, timeless
from tests.api.wire import error, ok
from tests.mcp.playing import MODEL, Playing

REASONING = {"type": "reasoning", "text": "Hm."}


COMMENTARY = {"type": "message", "phase": "commentary", "text": "I look it up."}


ANSWER = {"type": "message", "phase": "final_answer", "text": "It is so."}


FUNCTION_CALL = {"type": "function_call", "name": "f", "arguments": '{"a": 1}'}


def reasoned(text: str, **more: str) -> Json:
    return {"type": "reasoning", "text": text, **more}


def searched(status: str = "failed", **action: str) -> Json:
    return {"type": "web_search_call", "status": status, "action": action}


def incomplete(item: Json) -> Json:
    return {**item, "status": "incomplete"}


CATS = searched(type="search", query="cats")


BECOME: dict[str, list[Json]] = {
    "final": [ANSWER],
    "final again": [{**ANSWER, "text": "It is so.\nIt is so."}],
    "all of it": [REASONING, COMMENTARY, ANSWER],
    "two preambles": [COMMENTARY, REASONING, COMMENTARY, ANSWER],
    "two thoughts": [REASONING, REASONING, ANSWER],
    "call": [REASONING, COMMENTARY, FUNCTION_CALL],
    "no header": [{**ANSWER, "text": OUTPUTS["no header"]}],
    "no channel": [ANSWER],
    "unknown tool": [COMMENTARY, {**ANSWER, "text": '{"a": 1}'}],
    "reasoning, cut": [incomplete(reasoned("Hm"))],
    "preamble, cut": [REASONING, incomplete(COMMENTARY)],
    "final, cut": [REASONING, COMMENTARY, incomplete(ANSWER)],
    "call, cut": [incomplete(REASONING)],  # a call is reported once it is complete
    "whole call, cut": [REASONING, FUNCTION_CALL],
    "search": [REASONING, CATS, ANSWER],
    "search, cut": [searched("incomplete", type="search")],
    "only a search": [REASONING, CATS, {"type": "message", "text": ""}],
    "search, then thought": [CATS, REASONING, {"type": "message", "text": ""}],
    "open": [searched(type="open_page", url="https://example.com"), ANSWER],
    "open a link": [searched(type="open_page"), ANSWER],
    "open again": [searched(type="open_page"), ANSWER],
    "find": [searched(type="find_in_page", pattern="cat", url=""), ANSWER],
    "half a character": [searched(type="search", query="?"), ANSWER],
    "no JSON": [reasoned("cats!"), ANSWER],
    "no object": [reasoned("[1]"), ANSWER],
    "no such tool": [reasoned("{}"), ANSWER],
    "nothing at all": [ANSWER],
    "code": [REASONING, reasoned("print(1)\n"), ANSWER],
    "code, cut": [incomplete(reasoned("print(1)\n"))],
    "container": [reasoned('{"cmd": ["ls"]}'), ANSWER],
}


SEARCHES: Json = {"type": "web_search"}


INTERPRETER: Json = {"type": "code_interpreter", "container": {"type": "auto"}}


every_output = pytest.mark.parametrize("name", OUTPUTS)


@pytest.fixture(scope="module")
def engine() -> Playing:
    return Playing()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, engine: Playing) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("harmony")
    transcript = folder / "said.jsonl"
    transcript.write_text("\n".join(map(entry, [*OUTPUTS, SECOND_STEP])), "utf-8")
    source = f"replay:{transcript}"
    models = {
        MODEL: ModelSettings(source=source, family="gpt_oss"),
        OTHER: ModelSettings(source=source, family="qwen3"),
    }
    app = create_app(Settings(models=models))
    app.state.pool.make_engine = lambda **limits: engine
    with TestClient(app, base_url="http://localhost") as client:
        yield client


def entry(name: str) -> str:
    finish = "length" if name in CUT else "stop"
    return json.dumps({"match": name, "output": OUTPUTS[name], "finish": finish})


def body(name: str, **asked: Any) -> Json:
    tools = [FUNCTION, SEARCHES]
    return {"model": MODEL, "input": name, "tools": tools, "store": False, **asked}


def answered(client: TestClient, name: str, **asked: Any) -> Json:
    return ok(client.post(PATH, json=body(name, **asked)))


def streamed(client: TestClient, name: str, **asked: Any) -> list[Json]:
    response = client.post(PATH, json=body(name, stream=True, **asked))
    assert response.status_code == 200, response.text
    *blocks, _, _ = response.text.split("\n\n")
    return [json.loads(block.partition("\ndata: ")[2]) for block in blocks]


def summary(response: Json) -> list[Json]:
    return [_summary(item) for item in response["output"]]


def _summary(item: Json) -> Json:
    found_reports = {k: v for k, v in item.items() if k not in ("id", "call_id", "role", "summary")}
    if content := found_reports.pop("content", []):
        found_reports["text"] = "".join(part["text"] for part in content)
    if found_reports["status"] == "completed":
        del found_reports["status"]
    return found_reports


def without_call_ids(response: Json) -> Json:
    items = [{k: v for k, v in item.items() if k != "call_id"} for item in response["output"]]
    return {**timeless(response), "output": timeless({"output": items})["output"]}


@pytest.mark.slow
@every_output
def test_each_message_becomes_an_item(client: TestClient, name: str) -> None:
    response = answered(client, name)
    assert_response(response, is_open=False)
    assert summary(response) == BECOME[name]
    assert (response["status"] == "incomplete") == (name in CUT)


@pytest.mark.slow
@every_output
def test_streaming_equals_not_streaming(client: TestClient, name: str) -> None:
    tools = [FUNCTION, SEARCHES, INTERPRETER]
    response = assert_stream(streamed(client, name, tools=tools), is_open=False)
    whole = answered(client, name, tools=tools)
    assert without_call_ids(response) == without_call_ids(whole)


@pytest.mark.parametrize("name", ["all of it", "call", "final, cut", "two preambles"])
def test_phases_are_what_open_responses_knows(client: TestClient, name: str) -> None:
    assert_stream(streamed(client, name))


@every_output
def test_chat_tells_of_text_and_reasoning_as_ever(client: TestClient, name: str) -> None:
    messages = [{"role": "user", "content": name}]
    completion = ok(
        client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    )
    said = completion["choices"][0]["message"]
    of_messages = [item.get("text", "") for item in BECOME[name] if item["type"] == "message"]
    if "call" not in name:  # the request lacks it there
        assert said["content"] == "\n".join(of_messages)
    whole = [item for item in BECOME[name] if item in (REASONING, incomplete(REASONING))]
    thought = "Hm" if name == "reasoning, cut" else "\n".join(item["text"] for item in whole)
    assert said.get("reasoning", "") == thought


@pytest.mark.parametrize(
    ("name", "code", "status"),
    [
        ("code", "print(1)\n", "failed"),
        ("code, cut", "print(1)\n", "incomplete"),
        ("container", '{"cmd": ["ls"]}', "failed"),
        ("nothing at all", "", "failed"),
    ],
)
def test_code_is_a_call_where_there_is_an_interpreter(
    client: TestClient, name: str, code: str, status: str
) -> None:
    response = answered(client, name, tools=[INTERPRETER])
    assert_response(response, is_open=False)
    (made,) = [item for item in summary(response) if item["type"] == "code_interpreter_call"]
    assert (made["code"], made["status"], made["outputs"]) == (code, status, None)


@pytest.mark.parametrize("name", [name for name in OUTPUTS if "search" in name or "open" in name])
def test_a_search_that_was_not_offered_is_no_item(client: TestClient, name: str) -> None:
    found = summary(answered(client, name, tools=[FUNCTION]))
    assert {item["type"] for item in found} <= {"reasoning", "message"}
    assert [item["text"] for item in found if item["type"] == "message"] != ["Hm."]


def test_browsing_is_not_code(client: TestClient) -> None:
    assert summary(answered(client, "no such tool", tools=[INTERPRETER]))[0] == reasoned("{}")


def test_what_was_offered_is_a_function_call(client: TestClient) -> None:
    tools = [{"type": "function", "name": name} for name in ("browser", "python")]
    for name, called in [("only a search", "browser.search"), ("code", "python")]:
        items = summary(answered(client, name, tools=tools))
        (made,) = [item for item in items if item["type"] == "function_call"]
        assert made["name"] == called
    assert summary(answered(client, "code, cut", tools=tools)) == []


# --- and back again

USER: Json = {"role": "user", "content": "final"}


RESULT: Json = {"type": "function_call_output", "output": "42"}


def prompt_of(client: TestClient, engine: Playing, items: list[Json], **asked: Any) -> str:
    answered(client, "", input=items, **asked)
    return said_in(engine)


def said_in(engine: Playing) -> str:
    """The last prompt, without what comes before the first question."""
    _, user, said = engine.prompts[-1].partition("<|start|>user")
    return user + said


def sent_back(response: Json) -> list[Json]:
    return [dict(item) for item in response["output"]]


ASKED = "<|start|>user<|message|>{}<|end|>"


HM = "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"


LOOKING = "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"


SO = "<|start|>assistant<|channel|>final<|message|>It is so.<|end|>"


CALLED = (
    "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>"
    '{"a": 1}<|call|>'
)


FOUND = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>42<|end|>"


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
def test_an_open_round_goes_back_as_it_was(
    client: TestClient, engine: Playing, include: list[str]
) -> None:
    first = answered(client, "call", include=include)
    items = sent_back(first)
    if include:  # sealed is all that a client may have kept of it
        items[0]["content"] = None
    result = {**RESULT, "call_id": items[-1]["call_id"]}
    opened = [{"role": "user", "content": "call"}, *items, result]
    wanted = ASKED.format("call") + HM + LOOKING + CALLED + FOUND
    assert prompt_of(client, engine, opened) == wanted + "<|start|>assistant"


def test_an_open_round_goes_on_from_the_response_before(
    client: TestClient, engine: Playing
) -> None:
    first = answered(client, "call", store=True)
    result = {**RESULT, "call_id": first["output"][-1]["call_id"]}
    second = answered(client, "", input=[result], store=True, previous_response_id=first["id"])
    wanted = ASKED.format("call") + HM + LOOKING + CALLED + FOUND
    assert said_in(engine) == wanted + "<|start|>assistant"
    assert summary(second) == BECOME["call"], "the last question is the same"
    # another question closes it
    answered(client, "final", previous_response_id=second["id"])
    assert "Hm." not in said_in(engine)
    assert said_in(engine).count(LOOKING) == 2


def test_old_reasoning_does_not_go_back(client: TestClient, engine: Playing) -> None:
    include = ["reasoning.encrypted_content"]
    said = sent_back(answered(client, "all of it", include=include))
    asked = {"role": "user", "content": "all of it"}
    wanted = ASKED.format("all of it") + LOOKING + SO + ASKED.format("final")
    assert prompt_of(client, engine, [asked, *said, USER]) == wanted + "<|start|>assistant"


def test_commentary_closes_no_round(client: TestClient, engine: Playing) -> None:
    commentary = {"type": "message", "role": "assistant", "content": "I look it up."}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    open_turn = [USER, thought, {**commentary, "phase": "commentary"}]
    assert HM + LOOKING in prompt_of(client, engine, open_turn)
    closed_turn = [USER, thought, {**commentary, "phase": "final_answer"}]
    prompt = prompt_of(client, engine, closed_turn)
    assert "Hm." not in prompt
    assert "<|channel|>final<|message|>I look it up." in prompt


def test_calls_of_what_runs_nowhere_are_passed_over(client: TestClient, engine: Playing) -> None:
    tools = [FUNCTION, INTERPRETER]
    for name in ("search", "code"):
        first = answered(client, name, tools=tools)
        prompt = prompt_of(client, engine, [USER, *sent_back(first), USER], tools=tools)
        asked = ASKED.format("final")
        assert prompt == asked + SO + asked + "<|start|>assistant"


# --- Harmony's own messages

RAW = {"enable_response_messages": True}


def texts(messages: list[Json]) -> list[str]:
    """What openai-harmony reads in them."""
    read = [Message.from_dict(message) for message in messages]
    assert [message.to_dict() for message in read] == messages
    contents = [message.content for message in read]
    assert all(isinstance(c, TextContent) for content in contents[2:] for c in content)
    return ["".join(getattr(c, "text", "") for c in content) for content in contents]


def test_messages_in_and_out(client: TestClient) -> None:
    response = answered(client, "call", instructions="Be kind.", **RAW)
    assert_response(response, is_open=False)
    system, developer, user = response["input_messages"]
    assert (system["role"], developer["role"], user["role"]) == ("system", "developer", "user")
    assert system["content"][0]["reasoning_effort"] == "Medium"
    assert "Be kind." in str(developer)
    assert developer["content"][-1]["tools"]["functions"]["tools"][0]["name"] == "f"
    assert texts(response["input_messages"])[-1] == "call"
    assert texts(response["output_messages"]) == ["Hm.", "I look it up.", '{"a": 1}']
    assert response["output_messages"][-1] == {
        "role": "assistant",
        "name": None,
        "content": [{"type": "text", "text": '{"a": 1}'}],
        "channel": "commentary",
        "recipient": "functions.f",
        "content_type": "<|constrain|>json",
    }


@pytest.mark.slow
@every_output
def test_messages_are_told_at_the_end_of_a_stream(client: TestClient, name: str) -> None:
    events = streamed(client, name, **RAW)
    response = assert_stream(events, is_open=False)
    assert "input_messages" not in events[0]["response"]
    whole = answered(client, name, **RAW)
    for found_reports in ("input_messages", "output_messages"):
        assert response[found_reports] == whole[found_reports]
    assert whole["output_messages"]
    assert texts(whole["input_messages"])[-1] == name


def test_messages_of_a_broken_header_are_what_could_be_read(client: TestClient) -> None:
    (message,) = answered(client, "no header", **RAW)["output_messages"]
    assert (message["role"], message["content"][0]["text"]) == ("assistant", OUTPUTS["no header"])


def test_messages_end_where_the_answer_was_stopped(client: TestClient) -> None:
    (message,) = answered(client, "final", stop=" so", **RAW)["output_messages"]
    assert (message["channel"], message["content"][0]["text"]) == ("final", "It is so")


def test_who_only_called_what_runs_nowhere_is_led_on(client: TestClient) -> None:
    for name in ("only a search", "search, then thought"):
        messages = answered(client, name, **RAW)["output_messages"]
        assert [message["channel"] for message in messages] == ["analysis", "analysis", "final"]


def test_messages_are_told_to_those_who_ask(client: TestClient) -> None:
    for asked in ({}, {"enable_response_messages": None}, {"enable_response_messages": False}):
        response = answered(client, "final", **asked)
        assert not {"input_messages", "output_messages"} & response.keys()


def test_other_families_have_no_such_messages(client: TestClient) -> None:
    response = client.post(PATH, json=body("final", model=OTHER, **RAW))
    assert error(response)["param"] == "enable_response_messages"
    wrong = client.post(PATH, json=body("final", enable_response_messages="true"))
    assert error(wrong)["param"] == "enable_response_messages"
