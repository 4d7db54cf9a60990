"""Tools in namespaces and tools whose input is free text, as OpenAI's own client sees them."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.api.responses_schema import assert_stream
from tests.live.server import LiveServer, serving

Json = dict[str, Any]

GPT_OSS, QWEN, CODER = "gpt-oss", "qwen3", "coder"
EVERYWHERE = pytest.mark.parametrize("model", [GPT_OSS, QWEN, CODER])

PATCH = '*** Begin Patch\n+say("é")\n*** End Patch'
LARK = 'start: "*** Begin Patch" LF line+ "*** End Patch"\nline: "+" /(.*)/ LF\n%import common.LF'
OTHER = LARK.replace("Begin", "Commence")
RECURSIVE = 'start: "(" start ")" | /(.|\\n)*/'


def outputs(name: str, arguments: Json) -> dict[str, str]:
    """A call as each family writes it."""
    written = json.dumps(arguments, ensure_ascii=False)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    texts = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    return {
        GPT_OSS: f"{thought}{header}{written}<|call|>",
        QWEN: f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>',
        CODER: f"<tool_call>\n<function={name}>\n{texts}</function>\n</tool_call>",
    }


CALLS = {
    "patch": outputs("apply_patch", {"input": PATCH}),
    "look": outputs("mcp__docs__find", {"query": "x"}),
    "dots": outputs("mcp__docs.find", {"query": "x"}),
    "bare": outputs("find", {"query": "x"}),
}
FAMILIES = {GPT_OSS: "gpt_oss", QWEN: "qwen3", CODER: "qwen3_coder"}

FIND: Json = {
    "type": "function",
    "name": "find",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
DOCS: Any = {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [FIND]}


def custom(definition: str = "", syntax: str = "lark") -> Any:
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "apply_patch", **({"format": grammar} if definition else {})}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("tools")
    for model in FAMILIES:
        entries = [{"last": text, "output": each[model]} for text, each in CALLS.items()]
        final = "<|channel|>final<|message|>Done.<|return|>" if model == GPT_OSS else "Done."
        entries.append({"last": "result", "output": final})
        lines = "\n".join(map(json.dumps, entries))
        (folder / f"{model}.jsonl").write_text(lines, "utf-8")
    models = {
        model: {"source": f"replay:{model}.jsonl", "family": family, "preload": True}
        for model, family in FAMILIES.items()
    }
    with serving(folder, {"models": models}) as server:
        yield server
        assert "Traceback" not in server.log


def streamed(client: OpenAI, **asked: Any) -> Json:
    events = [event.to_dict() for event in client.responses.create(**asked, stream=True)]
    return assert_stream(events, is_open=False)


@EVERYWHERE
@pytest.mark.parametrize("text", ["look", "dots", "bare"])
def test_a_tool_of_a_namespace_is_called(client: OpenAI, model: str, text: str) -> None:
    made = streamed(client, model=model, input=text, tools=[DOCS])
    call = made["output"][-1]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "find", "mcp__docs")
    assert json.loads(call["arguments"]) == {"query": "x"}
    assert client.responses.retrieve(made["id"]).to_dict() == made


@EVERYWHERE
def test_a_round_with_a_namespace(client: OpenAI, model: str) -> None:
    first: Any = client.responses.create(model=model, input="look", tools=[DOCS])
    call = first.output[-1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "result"}
    stored = client.responses.create(
        model=model, input=[result], previous_response_id=first.id, tools=[DOCS]
    )
    said: Any = [{"role": "user", "content": "look"}, *(i.to_dict() for i in first.output), result]
    anew = client.responses.create(model=model, input=said, tools=[DOCS])
    assert stored.output_text == anew.output_text == "Done."
    assert stored.usage
    assert anew.usage
    assert stored.usage.input_tokens == anew.usage.input_tokens


@EVERYWHERE
def test_a_text_is_called_with(client: OpenAI, model: str) -> None:
    made = streamed(client, model=model, input="patch", tools=[custom()])
    call = made["output"][-1]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    result: Any = {
        "type": "custom_tool_call_output",
        "call_id": call["call_id"],
        "output": "result",
    }
    reported = client.responses.create(
        model=model, input=[result], previous_response_id=made["id"], tools=[custom()]
    )
    assert reported.output_text == "Done."


@EVERYWHERE
@pytest.mark.parametrize("tool", [custom(LARK), custom(r"\*{3} Begin(.|\n)*", "regex")])
def test_a_grammar_is_held(client: OpenAI, model: str, tool: Any) -> None:
    choice = {"type": "custom", "name": "apply_patch"}
    made = streamed(client, model=model, input="patch", tools=[tool], tool_choice=choice)
    assert made["output"][-1]["input"] == PATCH
    assert made.get("mlx_server", {}).get("unenforced", []) == []


@EVERYWHERE
@pytest.mark.parametrize("tool", [custom(OTHER), custom("a+", "regex")])
def test_a_recording_that_breaks_the_grammar_is_refused(
    client: OpenAI, model: str, tool: Any
) -> None:
    choice: Any = {"type": "custom", "name": "apply_patch"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=model, input="patch", tools=[tool], tool_choice=choice)
    assert caught.value.code == "recording_left_grammar"


@EVERYWHERE
def test_a_grammar_that_can_not_be_held_is_told(client: OpenAI, model: str) -> None:
    choice = {"type": "custom", "name": "apply_patch"}
    tools = [custom(RECURSIVE)]
    made = streamed(client, model=model, input="patch", tools=tools, tool_choice=choice)
    assert made["output"][-1]["input"] == PATCH
    assert made["mlx_server"]["unenforced"] == ["tools.apply_patch: format"]


@EVERYWHERE
def test_a_chat_calls_with_a_text(client: OpenAI, model: str) -> None:
    tool: Any = {"type": "custom", "custom": {"name": "apply_patch"}}
    asked: Any = {"model": model, "messages": [{"role": "user", "content": "patch"}]}
    (call,) = client.chat.completions.create(**asked, tools=[tool]).choices[0].message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "apply_patch", PATCH)
    chunks = client.chat.completions.create(**asked, tools=[tool], stream=True)
    calls = [chunk.choices[0].delta.to_dict().get("tool_calls") for chunk in chunks]
    text = "".join(each["custom"]["input"] for some in calls for each in some or ())
    assert text == PATCH


def test_a_thought_is_its_own_summary(client: OpenAI) -> None:
    asked: Any = {"model": GPT_OSS, "input": "look", "tools": [DOCS]}
    made = streamed(client, **asked, reasoning={"summary": "auto"})
    assert made["output"][0]["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert streamed(client, **asked)["output"][0]["summary"] == []


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web_search"}], "tools"),
        ([{"type": "custom"}], "tools[0].name"),
        ([{"type": "custom", "name": 5}], "tools[0].name"),
        ([custom("start: (")], "tools"),
        ([custom("x" * 10**6)], "tools[0].format.definition"),
        ([custom("start: x", "ebnf")], "tools[0].format.syntax"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [[]]}], "tools[0].tools[0]"),
        ([{"type": "namespace", "name": "n", "tools": [FIND] * 129}], "tools[0].tools"),
        ([{"type": "tool_search", "execution": "mine"}], "tools[0].execution"),
    ],
)
def test_what_is_no_tool_is_refused(client: OpenAI, tools: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=QWEN, input="look", tools=tools)
    assert str(caught.value.param).startswith(param)
