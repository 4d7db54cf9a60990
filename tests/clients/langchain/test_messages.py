"""Messages of LangChain and what the server has of them."""

from functools import reduce
from operator import add

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from mlx_server.clients.langchain import ChatMLX
from tests.clients.langchain.made import CALLED, REPAIRS, get_weather
from tests.clients.recorded import call, chunks, completion, recorded


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
