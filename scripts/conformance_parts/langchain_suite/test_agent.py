"""LangGraph's agent, run on ChatMLX and a live server."""

import os

from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.prebuilt import create_react_agent
from test_chat_mlx import MODEL

from mlx_server.clients.langchain import ChatMLX


@tool
def get_weather(location: str) -> str:
    """Get the weather at a location."""
    return f"It is sunny in {location}."


def test_an_agent_calls_its_tool_and_answers() -> None:
    llm = ChatMLX(model=MODEL, base_url=os.environ["OPENAI_BASE_URL"])
    agent = create_react_agent(llm, [get_weather])
    asked = {"messages": [("user", "What is the weather in San Francisco, CA?")]}
    _, call, result, answer = agent.invoke(asked)["messages"]
    assert isinstance(call, AIMessage)
    assert isinstance(result, ToolMessage)
    assert call.additional_kwargs["thinking"]
    assert result.content == "It is sunny in San Francisco, CA."
    assert answer.text == "It is sunny."
