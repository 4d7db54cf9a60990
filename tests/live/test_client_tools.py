"""Tools in namespaces and tools whose input is free text, as OpenAI's own client sees them."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.api.responses_schema import assert_stream
from tests.live.common import Models, common_models, transcript

Json = dict[str, Any]

GPT_OSS, QWEN, CODER = "tools-gpt-oss", "tools-qwen3", "tools-coder"
EVERYWHERE = pytest.mark.parametrize("model", [GPT_OSS, QWEN, CODER])

PATCH = '*** Begin Patch\n+say("é")\n*** End Patch'
LARK = 'start: "*** Begin Patch" LF line+ "*** End Patch"\nline: "+" /(.*)/ LF\n%import common.LF'


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


@common_models
def models(folder: Path, _: object) -> Models:
    for model in FAMILIES:
        entries = [{"last": text, "output": each[model]} for text, each in CALLS.items()]
        final = "<|channel|>final<|message|>Done.<|return|>" if model == GPT_OSS else "Done."
        transcript(folder / f"{model}.jsonl", [*entries, {"last": "result", "output": final}])
    return {
        model: {"source": f"replay:{model}.jsonl", "family": family}
        for model, family in FAMILIES.items()
    }


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
@pytest.mark.parametrize(
    ("tool", "unenforced"), [(custom(LARK), 1), (custom(r"\*{3} Begin(.|\n)*", "regex"), 0)]
)
def test_a_regular_expression_is_held(
    client: OpenAI, model: str, tool: Any, unenforced: int
) -> None:
    choice = {"type": "custom", "name": "apply_patch"}
    made = streamed(client, model=model, input="patch", tools=[tool], tool_choice=choice)
    assert made["output"][-1]["input"] == PATCH
    assert len(made.get("mlx_server", {}).get("unenforced", [])) == unenforced
