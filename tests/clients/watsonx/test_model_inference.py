"""`ModelInference` in place of IBM's: the same shapes, around IBM's object and at other servers."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlx_server.clients import watsonx
from mlx_server.clients.watsonx import ModelInference
from mlx_server.errors import BadRequest, GenerationFailed, SettingsError
from tests.clients.recorded import WEATHER, Wire, chunks, completion, recorded
from tests.clients.watsonx.signatures import METHODS, signatures
from tests.clients.watsonx.signatures import recorded as recorded_signatures

ASKED: list[Wire] = [{"role": "user", "content": "What is the weather?"}]
LEAKED = (
    "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)


ANSWERED = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>final<|message|>"


def at(url: str, **more: Any) -> ModelInference:
    credentials = {"url": f"openai+{url}", "api_key": "secret"}
    return ModelInference(model_id="m", credentials=credentials, project_id="p", **more)


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


PERSON = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
}


@dataclass
class Vendors:
    """Plays what IBM's object returns, and keeps what it was called with."""

    answers: list[Any]
    params: Any = None
    calls: list[Wire] = field(default_factory=list)
    model_id: str = "openai/gpt-oss-120b"

    def chat(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.answers.pop(0)

    async def achat(self, **arguments: Any) -> Any:
        return self.chat(**arguments)

    def chat_stream(self, **arguments: Any) -> Iterator[Any]:
        yield from self.chat(**arguments)

    async def achat_stream(self, **arguments: Any) -> AsyncIterator[Any]:
        for chunk in self.chat(**arguments):
            yield chunk

    generate_text = chat
    generate_text_stream = chat_stream

    def get_details(self) -> str:
        return "details"


class Params:
    """As IBM's classes of parameters."""

    def to_dict(self) -> Wire:
        return {"max_tokens": 9}


@pytest.mark.parametrize("method", METHODS)
def test_its_methods_take_what_those_of_ibms_class_take(method: str) -> None:
    ours, theirs = signatures(ModelInference)[method], recorded_signatures()["methods"][method]
    names = {name for name, _, _ in theirs}
    assert [each for each in ours if each[0] in names] == theirs
    extra = {name for name, _, _ in ours} - names
    assert extra == ({"family", "tool_parser", "repair"} if method == "__init__" else set())


def test_histories_have_no_null_content_and_no_earlier_thoughts() -> None:
    said: Wire = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [],
    }
    vendors = Vendors([completion("Yes.")])
    ModelInference.around(vendors).chat([*ASKED, said, *ASKED], context="c")
    assert vendors.calls[0]["messages"][1] == {"role": "assistant", "content": "", "tool_calls": []}
    assert vendors.calls[0]["context"] == "c"


STREAMED: list[tuple[Wire, str, Wire]] = [
    ({"content": '{"age": 5}'}, '{"age": 5}', {}),
    ({"content": '{"age": "old"}'}, '{"age": "old"}', {"unmet": ["$.age"]}),
    ({"content": ""}, "", {"unmet": ["content"]}),
    ({"reasoning_content": '{"age": 5}'}, '{"age": 5}', {"repairs": ["reasoning"]}),
]


@pytest.mark.parametrize(("said", "text", "reported"), STREAMED)
def test_a_stream_is_checked_in_the_end(said: Wire, text: str, reported: Wire) -> None:
    model = ModelInference.around(Vendors([chunks(said)]))
    found = list(model.chat_stream(ASKED, params=PERSON))
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == text
    warnings = found[-1].get("mlx_server", {})
    assert [each["what"] for each in warnings.get("repairs", ())] == reported.get("repairs", [])
    unmet = [each["what"].partition(":")[0] for each in warnings.get("unmet", ())]
    assert unmet == reported.get("unmet", [])


def test_a_stream_that_was_cut_off_is_an_error() -> None:
    cut = chunks({"content": "It "}, {"content": "rains."})[:-1]
    model = ModelInference.around(Vendors([cut, cut]))

    async def gathered() -> list[Wire]:
        return [each async for each in model.achat_stream(ASKED)]

    with pytest.raises(GenerationFailed, match="before the answer did"):
        list(model.chat_stream(ASKED))
    with pytest.raises(GenerationFailed, match="before the answer did"):
        asyncio.run(gathered())


def test_parameters_of_the_object_hold_where_a_call_has_none() -> None:
    vendors = Vendors([completion("Yes."), completion("Yes.")], params=Params())
    model = ModelInference.around(vendors)
    model.chat(ASKED)
    model.chat(ASKED, params={"temperature": 0})
    assert [each["params"] for each in vendors.calls] == [{"max_tokens": 9}, {"temperature": 0}]


def test_tools_are_described_in_the_prompt_where_they_are_ignored() -> None:
    made = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    vendors = Vendors([completion(made)])
    model = ModelInference.around(vendors, family="qwen3", tool_parser="hermes")
    named = {"type": "function", "function": {"name": "get_weather"}}
    found = model.chat(ASKED, tools=[WEATHER], tool_choice=named)
    assert found["choices"][0]["finish_reason"] == "tool_calls"
    assert set(vendors.calls[0]) == {"messages", "params"}
    assert "mlx_server" not in found


def test_generated_texts_are_without_thoughts() -> None:
    text = f"{ANSWERED}It rains.<|return|>"
    raw = {"results": [{"generated_text": text, "stop_reason": "eos_token"}]}
    pieces = [{"results": [{"generated_text": sign}]} for sign in text]
    pieces.append({"results": [{"generated_text": "", "stop_reason": "eos_token"}]})
    model = ModelInference.around(Vendors([text, [text, text], raw, pieces, [raw]]))
    assert model.generate_text("What is it?") == "It rains."
    assert model.generate_text(["What?", "Why?"]) == ["It rains.", "It rains."]
    clean = {"results": [{"generated_text": "It rains.", "stop_reason": "eos_token"}]}
    assert model.generate_text("What is it?", raw_response=True) == clean
    assert "".join(model.generate_text_stream("What is it?")) == "It rains."
    [streamed] = model.generate_text_stream("What is it?", raw_response=True)
    assert streamed == clean


@pytest.mark.parametrize("raw", [False, True])
def test_generated_text_that_is_cut_off_is_an_error(raw: bool) -> None:
    piece = {"results": [{"generated_text": "It ra", "stop_reason": "not_finished"}]}
    found = ModelInference.around(Vendors([[piece]])).generate_text_stream("It", raw_response=raw)
    with pytest.raises(GenerationFailed, match="before the answer did"):
        list(found)
    choice = {"index": 0, "text": "It ra", "finish_reason": None}
    with recorded([{"choices": [choice]}]) as server, pytest.raises(GenerationFailed):
        list(at(server.url).generate_text_stream("It", raw_response=raw))


@pytest.mark.skipif(bool(importlib.util.find_spec("ibm_watsonx_ai")), reason="IBM's is installed")
def test_without_ibms_package_the_error_says_what_to_do() -> None:
    with pytest.raises(SettingsError, match=r"mlx-local-server\[watsonx\]"):
        ModelInference(model_id="m", credentials={"url": "https://us-south.ml.cloud.ibm.com"})
    with pytest.raises(ImportError, match="Credentials comes from IBM's package"):
        _ = watsonx.Credentials


def test_another_endpoint_answers_in_ibms_shape() -> None:
    with recorded(completion(LEAKED), chunks({"content": "It rains."})) as server:
        model = at(server.url, params={"max_tokens": 5})
        found = model.chat(ASKED, tools=[WEATHER], tool_choice_option="required")
        stream = list(model.chat_stream(ASKED))
    assert found["model_id"] == "m"
    assert found["choices"][0]["finish_reason"] == "tool_calls"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in stream) == "It rains."
    asked, _ = server.requests
    assert (asked["model"], asked["max_tokens"], asked["tool_choice"]) == ("m", 5, "required")
    assert server.keys == ["Bearer secret"] * 2


def test_another_endpoint_generates_text_too() -> None:
    choice = {"index": 0, "text": f"{ANSWERED}It rains.", "finish_reason": "length"}
    body = {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    params = {"decoding_method": "greedy", "max_new_tokens": 4, "stop_sequences": ["x"]}
    with recorded(body, body, [body]) as server:
        model = at(server.url)
        assert model.generate_text("It", params=params) == "It rains."
        [result] = model.generate_text("It", raw_response=True)["results"]
        assert "".join(model.generate_text_stream("It")) == "It rains."
    assert result == {
        "generated_text": "It rains.",
        "generated_token_count": 4,
        "input_token_count": 3,
        "stop_reason": "max_tokens",
    }
    assert server.requests[0] == {
        "model": "m",
        "prompt": "It",
        "temperature": 0,
        "max_tokens": 4,
        "stop": ["x"],
    }
    assert server.paths == ["/v1/completions"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "mistral", "smollm2"])
@pytest.mark.parametrize("owner", ["vllm", "llamacpp", 5])
def test_a_text_has_the_delimiters_of_its_thoughts_where_the_server_can(
    owner: Any, family: str
) -> None:
    said = {
        "qwen3": "<think>Rain?</think>It rains.",
        "gpt_oss": f"{ANSWERED}It rains.",
        "mistral": "[THINK]Rain?[/THINK]It rains.",
        "smollm2": "It rains.",
    }
    choices = [{"text": said[family], "finish_reason": "stop"}]
    with recorded({"choices": choices}, [{"choices": choices}]) as server:
        server.models = {"data": [{"id": "other"}, {"id": "m", "owned_by": owner}]}
        model = at(server.url, family=family)
        assert model.generate_text("It") == "It rains."
        assert "".join(model.generate_text_stream("It")) == "It rains."
    can = owner == "vllm" and family != "smollm2"
    fields = [each.get("skip_special_tokens") for each in server.requests]
    assert fields == [False if can else None] * 2
    assert server.lists == (family != "smollm2")  # once, and only where it matters


OPEN = "<|im_start|>user\nIt?<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "written", "text"),
    [
        (OPEN, "Rain?\n</think>\n\nIt rains.", "It rains."),
        (OPEN, "It rains.", "It rains."),  # the server sent no delimiters
        (OPEN, "", ""),
        (f"{OPEN}\n</think>\n\n", "It rains.", "It rains."),
        (f"{OPEN}\n</think>\n\n", "<think>Rain?</think>It rains.", "It rains."),
        ("Say <think> once.", "It rains.", "It rains."),
    ],
)
def test_a_thought_that_the_prompt_opens_is_no_text(prompt: str, written: str, text: str) -> None:
    cuts = [written[at : at + 3] for at in range(0, len(written), 3)]
    deltas = [{"choices": [{"text": cut, "finish_reason": None}]} for cut in cuts]
    ended = {"choices": [{"text": "", "finish_reason": "stop"}]}
    whole = {"choices": [{"text": written, "finish_reason": "stop"}]}
    with recorded(whole, whole, whole, [*deltas, ended]) as server:
        model = at(server.url, family="qwen3")
        assert model.generate_text(prompt) == text
        assert model.generate_text([prompt, "It"])[0] == text
        assert "".join(model.generate_text_stream(prompt)) == text


@pytest.mark.parametrize("models", [None, "{", "[" * 100_000, "", [], {"data": [5]}, 5])
def test_a_server_without_a_list_of_models_generates_text(models: Any) -> None:
    body = {"choices": [{"text": "It rains.", "finish_reason": "stop"}]}
    with recorded(body) as server:
        server.models = models
        assert at(server.url).generate_text("It") == "It rains."
    assert server.lists == 1
    assert "skip_special_tokens" not in server.requests[0]


def test_what_only_watsonx_has_is_refused_by_name_elsewhere() -> None:
    model = at("http://127.0.0.1:1/v1")
    with pytest.raises(BadRequest, match="guardrails"):
        model.generate_text("It", guardrails=True)
    with pytest.raises(BadRequest, match="truncate_input_tokens"):
        model.generate_text("It", params={"truncate_input_tokens": 5})
    with pytest.raises(BadRequest, match="context"):
        model.chat(ASKED, context="c")
