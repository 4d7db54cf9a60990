"""Conversations of langchain-openai and langchain-anthropic."""

import json
from collections.abc import Callable, Iterable
from functools import reduce
from operator import add
from typing import Any

from conversations.weather import CITIES, CONNECTOR, DESCRIPTION, NAME, QUESTIONS, Weather, check
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI

PACKAGES = ("langchain-openai", "langchain-anthropic")


def talking(*, stream: bool, kind: Any = ChatOpenAI, **options: Any) -> Callable[[str], None]:
    def talk(model: str) -> None:
        weather = Weather()

        @as_tool(NAME, description=DESCRIPTION)
        def tool(city: str) -> str:
            return weather(city)

        chat = kind(model=model, **options).bind_tools([tool])
        answers: list[str] = []
        said: list[BaseMessage] = []
        for question in QUESTIONS:
            said.append(HumanMessage(question))
            while (message := answer(chat, said, stream=stream)).tool_calls:
                said += [message, *(tool.invoke(call) for call in message.tool_calls)]
            said.append(message)
            answers.append(last_text(message))
        assert any(isinstance(message, ToolMessage) for message in said)
        check(weather.asked, answers)

    return talk


def answer(chat: Any, said: list[BaseMessage], *, stream: bool) -> AIMessage:
    found: AIMessage = reduce(add, chat.stream(said)) if stream else chat.invoke(said)
    return found


def last_text(message: BaseMessage) -> str:
    """Returns the last of several texts, which is the answer."""
    if isinstance(message.content, str):
        return message.content
    texts = [block["text"] for block in message.content if block["type"] == "text"]
    return str(texts[-1])


def with_mcp(*, stream: bool) -> Callable[[str], None]:
    def talk(model: str) -> None:
        there = {
            "type": "mcp",
            "server_label": "there",
            "connector_id": CONNECTOR,
            "require_approval": "never",
        }
        chat = ChatOpenAI(model=model, use_responses_api=True).bind_tools([there])
        answers: list[str] = []
        said: list[BaseMessage] = []
        for question in QUESTIONS:
            said.append(HumanMessage(question))
            said.append(answer(chat, said, stream=stream))
            answers.append(last_text(said[-1]))
        check(_asked(said), answers)

    return talk


def _asked(said: list[BaseMessage]) -> list[str]:
    """Returns the cities in the order of the conversation: calls that run together may end in any
    order."""
    blocks = [block for message in said for block in message.content if isinstance(block, dict)]
    calls = [block for block in blocks if block.get("type") == "mcp_call"]
    return sorted((json.loads(call["arguments"])["city"] for call in calls), key=CITIES.index)


def conversations() -> Iterable[tuple[str, Callable[[str], None]]]:
    responses: dict[str, Any] = {"use_responses_api": True}
    chain = {**responses, "use_previous_response_id": True}
    unstored = {**responses, "store": False, "include": ["reasoning.encrypted_content"]}
    yield "langchain-openai items sent back", talking(stream=False, **responses)
    yield "langchain-openai items sent back, streamed", talking(stream=True, **responses)
    yield "langchain-openai v1, streamed", talking(stream=True, output_version="v1", **responses)
    yield "langchain-openai not stored, streamed", talking(stream=True, **unstored)
    yield "langchain-openai previous_response_id", talking(stream=False, **chain)
    yield "langchain-openai previous_response_id, streamed", talking(stream=True, **chain)
    yield "langchain-openai MCP", with_mcp(stream=False)
    yield "langchain-openai MCP, streamed", with_mcp(stream=True)
    yield "langchain-openai chat", talking(stream=False, use_responses_api=False)
    yield "langchain-openai chat, streamed", talking(stream=True, use_responses_api=False)
    yield "langchain-anthropic", talking(stream=False, kind=ChatAnthropic, max_tokens=1000)
    yield "langchain-anthropic, streamed", talking(stream=True, kind=ChatAnthropic, max_tokens=1000)
