"""ChatMLX as LangChain's users see it; scripts/conformance runs LangChain's own tests on it."""

import asyncio
from functools import reduce
from operator import add
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from mlx_server.clients.langchain import ChatMLX
from mlx_server.clients.providers import LLMProvider, ProviderConfig
from mlx_server.errors import GenerationFailed
from tests.clients.recorded import Wire, call, chunks, completion, recorded

PARIS = '{"city": "Paris"}'
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


REPAIRS = {"repairs": [{"index": 0, "what": "name", "where": "tool_calls[0].function.name"}]}


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


CALLED = {
    **completion(None, reasoning_content="Paris?", tool_calls=[call("get_weather", PARIS)]),
    "usage": USAGE,
    "mlx_server": REPAIRS,
}


def streamed() -> list[Wire]:
    pieces: list[Wire] = [
        {"reasoning_content": "Pa"},
        {"reasoning_content": "ris?"},
        {"content": "Let me "},
        {"content": "see."},
        {"tool_calls": [{"index": 0, **call("get_weather", "")}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
    ]
    return [*chunks(*pieces, reason="tool_calls"), {"choices": [], "usage": USAGE, "model": "m"}]


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_stream_adds_up_to_the_message(version: str, awaited: bool) -> None:
    async def gathered(llm: ChatMLX) -> list[Any]:
        return [each async for each in llm.astream("Weather?")]

    with recorded(streamed()) as server:
        llm = ChatMLX(model="m", base_url=server.url, output_version=version)
        pieces = asyncio.run(gathered(llm)) if awaited else list(llm.stream("Weather?"))
    found = reduce(add, pieces)
    assert found.text == "Let me see."
    assert found.additional_kwargs["thinking"] == "Paris?"
    kinds = [each["type"] for each in found.content_blocks]
    assert kinds == ["reasoning", "text", "tool_call"]
    assert [each["args"] for each in found.tool_calls] == [{"city": "Paris"}]
    assert found.usage_metadata
    assert found.usage_metadata["total_tokens"] == 12
    assert server.requests[0]["stream_options"] == {"include_usage": True}


def test_errors_name_what_was_wrong() -> None:
    with recorded({"error": {"message": "no such model"}}, {"choices": []}) as server:
        llm = ChatMLX(model="m", base_url=server.url, max_retries=0)
        with pytest.raises(openai.BadRequestError, match="no such model"):
            llm.invoke("Is it?")
        with pytest.raises(GenerationFailed, match="no `choices`"):
            llm.invoke("Is it?")
    with recorded([{"choices": [{"index": 0, "delta": {"content": "Ye"}}]}]) as server:
        cut = ChatMLX(model="m", base_url=server.url).stream("Is it?")
        with pytest.raises(GenerationFailed, match="before the answer did"):
            list(cut)


# A schema as LangChain asks for it, and a tool that is chosen.


class City(BaseModel):
    """A city."""

    city: str


METHODS: dict[Literal["json_schema", "function_calling", "json_mode"], Wire] = {
    "json_schema": completion(PARIS),
    "json_mode": completion(PARIS),
    "function_calling": completion(None, tool_calls=[call("City", PARIS)]),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_schema_is_asked_for_by_each_method(method: Any) -> None:
    with recorded(METHODS[method], METHODS[method]) as server:
        llm = ChatMLX(model="m", base_url=server.url)
        assert llm.with_structured_output(City, method=method).invoke("Where?") == City(
            city="Paris"
        )
        schema = {"title": "City", **City.model_json_schema()}
        raw = llm.with_structured_output(schema, method=method, include_raw=True).invoke("Where?")
    assert (raw["parsed"], raw["parsing_error"]) == ({"city": "Paris"}, None)
    first, second = server.requests
    wanted = {"json_schema": "json_schema", "json_mode": "json_object"}.get(method)
    for body in (first, second):
        assert body.get("response_format", {}).get("type") == wanted
        assert ("tools" in body) == (method == "function_calling")


def test_a_tool_is_chosen_by_its_name_only_if_it_is_there() -> None:
    llm = ChatMLX(model="m")
    with pytest.raises(ValueError, match="the tools are get_weather"):
        llm.bind_tools([get_weather], tool_choice="get_time")
    bound: Any = llm.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    assert bound.kwargs["tool_choice"]["function"] == {"name": "get_weather"}
    assert bound.kwargs["parallel_tool_calls"] is False


# Messages of LangChain and what the server has of them.


def test_a_message_has_thoughts_calls_usage_and_repairs() -> None:
    with recorded(CALLED) as server:
        llm = ChatMLX(model="m", base_url=server.url, thinking_budget=8, max_response_tokens=50)
        found = llm.bind_tools([get_weather], strict=True, tool_choice="any").invoke("Weather?")
    assert found.additional_kwargs["thinking"] == "Paris?"
    assert [each["type"] for each in found.content_blocks] == ["reasoning", "tool_call"]
    assert [each["args"] for each in found.tool_calls] == [{"city": "Paris"}]
    assert found.usage_metadata is not None
    assert found.usage_metadata["output_token_details"] == {"reasoning": 3}
    assert found.usage_metadata["input_token_details"] == {"cache_read": 4}
    assert found.response_metadata["mlx_server"] == REPAIRS
    [body] = server.requests
    assert (body["thinking_budget"], body["max_response_tokens"]) == (8, 50)
    assert body["tool_choice"] == "required"
    assert body["tools"][0]["function"]["strict"]


def test_a_conversation_goes_back_with_thoughts_calls_and_results() -> None:
    earlier = AIMessage(
        [{"type": "reasoning", "reasoning": "Paris?"}, {"type": "text", "text": "I look."}],
        tool_calls=[{"name": "get_weather", "args": {"city": "Paris"}, "id": "1"}],
    )
    said = [SystemMessage("Be brief."), HumanMessage("Weather?"), earlier]
    with recorded(completion("It rains."), completion("It rains.")) as server:
        llm = ChatMLX(model="m", base_url=server.url, extra_body={"adapter": "a"})
        llm.invoke([*said, ToolMessage("Rain.", tool_call_id="1")], stop=["x"])
        ChatMLX(model="m", base_url=server.url, sends_thoughts=False).invoke(said)
    first, second = server.requests
    assert [each["role"] for each in first["messages"]] == ["system", "user", "assistant", "tool"]
    sent = first["messages"][2]
    assert (sent["content"], sent["reasoning_content"]) == ("I look.", "Paris?")
    assert sent["tool_calls"][0]["function"]["name"] == "get_weather"
    assert (first["adapter"], first["stop"]) == ("a", ["x"])
    assert "reasoning_content" not in second["messages"][2]


@pytest.mark.slow
def test_answers_of_other_servers_are_read_by_family() -> None:
    leaked = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    with recorded(
        completion(leaked), chunks({"content": leaked[:20]}, {"content": leaked[20:]})
    ) as server:
        llm = ChatMLX(model="m", base_url=server.url, family="gpt_oss")
        both = [llm.invoke("Is it?"), reduce(add, llm.stream("Is it?"))]
    assert [each.text for each in both] == ["Yes.", "Yes."]
    assert [each.additional_kwargs["thinking"] for each in both] == ["Hm.", "Hm."]


def test_broken_arguments_are_an_invalid_call() -> None:
    broken = completion(None, tool_calls=[call("get_weather", "{")])
    with recorded(broken) as server:
        found = ChatMLX(model="m", base_url=server.url).invoke("Weather?")
    assert found.tool_calls == []
    assert [each["name"] for each in found.invalid_tool_calls] == ["get_weather"]


# LangChain's client of a provider.


@pytest.mark.parametrize("backend", ["mlx_server", "openai"])
def test_the_client_of_a_provider_writes_thoughts_as_configured(backend: Any) -> None:
    answer = completion("Yes.", reasoning_content="Hm.")
    config = ProviderConfig(name="p", model_name="m", provider=backend, parsing_format="think_tags")
    with recorded(answer, CALLED) as server:
        provider = LLMProvider(ProviderConfig(**{**_fields(config), "base_url": server.url}))
        found = provider.client.invoke("Is it?")
        called = provider.client.bind_tools([get_weather]).invoke("Weather?")
    assert found.content == "<think>\nHm.\n</think>\n\nYes."
    parsed = provider.parse_response(found.content)
    assert parsed == {"response": "Yes.", "thinking": "Hm."}
    assert found.additional_kwargs["thinking"] == "Hm."
    assert [each["name"] for each in called.tool_calls] == ["get_weather"]


def _fields(config: ProviderConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}
