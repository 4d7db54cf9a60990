"""Replay models as a test of an app meets them: matching, loops, grammars, mistakes in the file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from openai import OpenAI

from tests.live.common import Models, common_models
from tests.live.fork_server import ran
from tests.live.server import LiveServer
from tests.tables import cases

QWEN, HELD, OSS, ALIAS = "recorded", "recorded-held", "recorded-oss", "gpt-4o"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
    },
}
FINAL = "<|channel|>final<|message|>"
OSS_CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'

SAID = Path(__file__).with_name("recorded_answers.yaml").read_text("utf-8")
OSS_SAID = [
    {
        "match": "leaves",
        "output": f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{FINAL}Paris.",
    },
    {"match": "follows", "output": f'{FINAL}{{"city": "Paris"}}'},
    {
        "match": "thinks",
        "output": "<|channel|>analysis<|message|>Let me see. Paris it is.<|end|>"
        f'<|start|>assistant{FINAL}{{"city": "Paris", "people": 1}}',
    },
    {"match": "calls", "output": OSS_CALL},
    {"match": "calls", "output": f"{FINAL}It is 2."},
]


@common_models
def models(folder: Path, _: object) -> Models:
    (folder / "said.yaml").write_text(SAID, "utf-8")
    (folder / "oss.json").write_text(json.dumps(OSS_SAID), "utf-8")
    qwen = {"source": "replay:said.yaml", "family": "qwen3"}
    return {
        QWEN: {**qwen, "aliases": [ALIAS]},
        HELD: {**qwen, "constrain_calls": True},
        OSS: {"source": "replay:oss.json", "family": "gpt_oss", "constrain_calls": True},
    }


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with server.openai(timeout=120) as client:  # Harmony's vocabulary takes a while
        yield client


def asked(client: OpenAI, text: str, *later: Any, model: str = QWEN, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}, *later]
    return client.chat.completions.create(model=model, messages=messages, **more)


def text(completion: Any) -> str:
    found: str = completion.choices[0].message.content
    return found


def refused(client: OpenAI, text: str, **more: Any) -> dict[str, Any]:
    """The error's body."""
    with pytest.raises(openai.APIError) as caught:
        list(asked(client, text, **more))  # a stream fails only when it is read
    assert isinstance(caught.value.body, dict)
    return caught.value.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "entry", "reported"),
    [
        ("leaves", 1, r'after "\{\\"city\\": \\"Paris\\", \\"p": it has "o", .* takes "e"\.'),
        ("ends early", 2, r"it has the end of the answer \(<\|endoftext\|>\), .* takes \",\","),
        ("is prose", 3, r"at token 1, at its beginning: it has .P., .* takes .*\{"),
    ],
)
def test_a_recording_that_leaves_the_grammar_is_an_error(
    client: OpenAI, said: str, entry: int, reported: str, stream: bool
) -> None:
    first = refused(client, said, response_format=FORMAT, stream=stream)
    assert first["code"] == "recording_left_grammar"
    assert first["message"].startswith(f"The output of entry {entry} of said.yaml (line ")
    assert re.search(reported, first["message"]), first["message"]
    assert first["param"] == "response_format.json_schema.schema"
    assert refused(client, said, response_format=FORMAT, stream=stream) == first


def test_a_recording_that_follows_the_grammar_is_played(client: OpenAI) -> None:
    said = '{"city": "Paris", "people": 2018}'
    assert text(asked(client, "follows", response_format=FORMAT)) == said
    assert text(asked(client, "leaves")) == '{"city": "Paris", "population": 2018}'


def test_a_recording_may_go_astray_where_it_says_so(client: OpenAI) -> None:
    asking: Any = {"response_format": FORMAT, "max_tokens": 100, "temperature": 0}
    assert set(json.loads(text(asked(client, "goes astray", **asking)))) == {"city", "people"}


def test_calls_are_held_where_the_owner_wants_it(client: OpenAI) -> None:
    (call,) = asked(client, "calls wrongly", tools=[TOOL]).choices[0].message.tool_calls
    assert call.function.name == "add"
    error = refused(client, "calls wrongly", model=HELD, tools=[TOOL])
    assert error["code"] == "recording_left_grammar"
    assert error["param"] == "tools"
    assert "`constrain_calls: false`" in error["message"]
    strict = {**TOOL, "function": {**TOOL["function"], "strict": False}}
    required = refused(client, "is prose", tools=[strict], tool_choice="required")
    assert required["code"] == "recording_left_grammar"


@pytest.mark.parametrize(("model", "question"), [(HELD, "How much is it? 🙂"), (OSS, "calls")])
def test_a_loop_of_an_agent_comes_to_its_end(client: OpenAI, model: str, question: str) -> None:
    messages: Any = [{"role": "user", "content": question}]
    for _ in range(5):
        found = client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
        message = found.choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[-1]["content"] == "It is 2."


def _config(folder: Path, models: Any) -> Path:
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": models}), "utf-8")
    return path


@cases
def test_a_broken_transcript_is_reported_at_the_start_and_by_doctor(
    tmp_path: Path, transcript: str | None, reported: str
) -> None:
    if transcript is not None:
        (tmp_path / "said.yaml").write_text(transcript)
    replay = {"source": "replay:said.yaml", "family": "plain"}
    config = _config(tmp_path, {"fake": replay, "same": dict(replay)})
    serve = ran("serve", "--config", str(config), "--port", "0")
    assert serve.returncode == 2
    assert serve.stderr.count(reported) == 1
    assert f"fake: {reported}" in serve.stderr.replace("The transcript can't be played: ", "")
