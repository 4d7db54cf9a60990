"""gpt-oss's answers as responses, and back again: through the whole app, with an engine that plays
what is written here.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import CompactedResponse
from starlette.testclient import TestClient

from mlx_server.api.responses.compact import ASK
from mlx_server.api.responses.input import SUMMARY
from mlx_server.app import create_app
from mlx_server.config.settings import ModelSettings, Settings
from tests.api.responses_schema import Json, assert_stream, timeless
from tests.api.wire import error, ok
from tests.mcp.playing import MODEL, Playing

PATH = "/v1/responses"
OTHER = "other"
NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look it up."
FINAL = "<|channel|>final<|message|>It is so."
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'


def built_in(tool: str, text: str, channel: str = "analysis") -> str:
    return f"<|channel|>{channel} to={tool} code<|message|>{text}"


CATS = '{"query": "cats", "topn": 3}'
SEARCH = built_in("browser.search", CATS)
PYTHON = built_in("python", "print(1)\n")
UNFRAMED = "It is so, and I go on for a while."
FUNCTION: Json = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
SEARCHES: Json = {"type": "web_search"}

REASONING = {"type": "reasoning", "text": "Hm."}
COMMENTARY = {"type": "message", "phase": "commentary", "text": "I look it up."}
ANSWER = {"type": "message", "phase": "final_answer", "text": "It is so."}
FUNCTION_CALL = {"type": "function_call", "name": "f", "arguments": '{"a": 1}'}


def reasoned(text: str, **more: str) -> Json:
    return {"type": "reasoning", "text": text, **more}


def incomplete(item: Json) -> Json:
    return {**item, "status": "incomplete"}


OUTPUTS: dict[str, tuple[str, list[Json]]] = {
    "final": (FINAL, [ANSWER]),
    "final again": (FINAL + NEXT + FINAL, [{**ANSWER, "text": "It is so.\nIt is so."}]),
    "all of it": (THOUGHT + PREAMBLE + NEXT + FINAL, [REASONING, COMMENTARY, ANSWER]),
    "two thoughts": (THOUGHT + THOUGHT + FINAL, [REASONING, REASONING, ANSWER]),
    "call": (THOUGHT + PREAMBLE + NEXT + CALL + "<|call|>", [REASONING, COMMENTARY, FUNCTION_CALL]),
    "no header": (UNFRAMED, [{**ANSWER, "text": UNFRAMED}]),
    "no channel": ("<|message|>It is so.", [ANSWER]),
    "unknown tool": (
        PREAMBLE + NEXT + CALL.replace("functions.f", "functions.g"),
        [COMMENTARY, {**ANSWER, "text": '{"a": 1}'}],
    ),
    "reasoning, cut": ("<|channel|>analysis<|message|>Hm", [incomplete(reasoned("Hm"))]),
    "preamble, cut": (THOUGHT + PREAMBLE, [REASONING, incomplete(COMMENTARY)]),
    "final, cut": (THOUGHT + PREAMBLE + NEXT + FINAL, [REASONING, COMMENTARY, incomplete(ANSWER)]),
    "call, cut": (THOUGHT + CALL.removesuffix("}"), [incomplete(REASONING)]),
    "whole call, cut": (THOUGHT + CALL, [REASONING, FUNCTION_CALL]),
    "search": (THOUGHT + SEARCH + NEXT + FINAL, [REASONING, reasoned(CATS), ANSWER]),
    "search, cut": (
        built_in("browser.search", '{"query": "ca'),
        [incomplete(reasoned('{"query": "ca'))],
    ),
    "only a search": (
        THOUGHT + SEARCH,
        [REASONING, reasoned(CATS), {"type": "message", "text": ""}],
    ),
    "search, then thought": (
        SEARCH + NEXT + "<|channel|>analysis<|message|>Hm.",
        [reasoned(CATS), REASONING, {"type": "message", "text": ""}],
    ),
    "no such tool": (built_in("browser.click", "{}") + NEXT + FINAL, [reasoned("{}"), ANSWER]),
    "nothing at all": (built_in("python", "") + NEXT + FINAL, [ANSWER]),
    "code": (THOUGHT + PYTHON + NEXT + FINAL, [REASONING, reasoned("print(1)\n"), ANSWER]),
    "code, cut": (PYTHON, [incomplete(reasoned("print(1)\n"))]),
    "container": (
        built_in("container.exec", '{"cmd": ["ls"]}', "commentary") + NEXT + FINAL,
        [reasoned('{"cmd": ["ls"]}'), ANSWER],
    ),
    ASK: (THOUGHT + FINAL, [REASONING, ANSWER]),
}
"""What gpt-oss writes, and the items that it becomes. A call is reported once it is complete."""

SECOND_STEP = "call"
"""What is played once more, for the results of its call."""


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
    finish = "length" if name.endswith(", cut") else "stop"
    return json.dumps({"match": name, "output": OUTPUTS[name][0], "finish": finish})


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
    fields = {k: v for k, v in item.items() if k not in ("id", "call_id", "role", "summary")}
    if content := fields.pop("content", []):
        fields["text"] = "".join(part["text"] for part in content)
    if fields["status"] == "completed":
        del fields["status"]
    return fields


def without_call_ids(response: Json) -> Json:
    items = [{k: v for k, v in item.items() if k != "call_id"} for item in response["output"]]
    return {**timeless(response), "output": timeless({"output": items})["output"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTPUTS)
def test_each_message_becomes_an_item(client: TestClient, name: str) -> None:
    response = assert_stream(streamed(client, name))
    assert summary(response) == OUTPUTS[name][1]
    assert (response["status"] == "incomplete") == name.endswith(", cut")
    assert without_call_ids(answered(client, name)) == without_call_ids(response)


@pytest.mark.parametrize("name", ["all of it", "two thoughts", "unknown tool", "search"])
def test_chat_has_all_texts_and_thoughts(client: TestClient, name: str) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": name}]}
    message = ok(client.post("/v1/chat/completions", json=asked))["choices"][0]["message"]
    items = OUTPUTS[name][1]
    texts = [item.get("text", "") for item in items if item["type"] == "message"]
    assert message["content"] == "\n".join(texts)
    thoughts = [item["text"] for item in items if item == REASONING]
    assert message.get("reasoning", "") == "\n".join(thoughts)


def test_what_was_offered_is_a_function_call(client: TestClient) -> None:
    tools = [{"type": "function", "name": name} for name in ("browser", "python")]
    for name, called in [("only a search", "browser.search"), ("code", "python")]:
        items = summary(answered(client, name, tools=tools))
        (made,) = [item for item in items if item["type"] == "function_call"]
        assert made["name"] == called
    assert summary(answered(client, "code, cut", tools=tools)) == []


# And back again

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
    assert summary(second) == OUTPUTS["call"][1], "the last question is the same"
    # another question closes it
    answered(client, "final", previous_response_id=second["id"])
    assert "Hm." not in said_in(engine)
    assert said_in(engine).count(LOOKING) == 2


def test_a_conversation_goes_on_from_its_summary(client: TestClient, engine: Playing) -> None:
    first = answered(client, "call")
    result = {**RESULT, "call_id": first["output"][-1]["call_id"]}
    asked = body("", input=[{"role": "user", "content": "call"}, *sent_back(first), result])
    compacted = ok(client.post(f"{PATH}/compact", json=asked))
    assert FOUND + ASKED.format(ASK) + "<|start|>assistant" in said_in(engine)
    *_, compaction = compacted["output"]
    CompactedResponse.model_validate({**compacted, "output": [compaction]}, strict=True)
    assert "It is so." not in json.dumps(compacted)
    wanted = ASKED.format("call") + ASKED.format(SUMMARY + "It is so.") + ASKED.format("final")
    assert prompt_of(client, engine, [*compacted["output"], USER]) == wanted + "<|start|>assistant"
    foreign = {"type": "compaction", "encrypted_content": "gAAAAABo"}
    response = client.post(PATH, json=body("", input=[foreign, USER], tools=[FUNCTION]))
    assert response.headers["x-mlx-server-ignored"] == "input.encrypted_content"
    assert said_in(engine) == ASKED.format("final") + "<|start|>assistant"
    cut = client.post(f"{PATH}/compact", json={**asked, "max_output_tokens": 3})
    assert error(cut)["param"] == "max_output_tokens"


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
    for name in ("search", "code"):
        first = answered(client, name)
        prompt = prompt_of(client, engine, [USER, *sent_back(first), USER])
        asked = ASKED.format("final")
        assert prompt == asked + SO + asked + "<|start|>assistant"
