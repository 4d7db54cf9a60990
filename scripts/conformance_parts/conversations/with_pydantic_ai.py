"""Conversations of pydantic-ai."""

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

from conversations.weather import CONNECTOR, DESCRIPTION, NAME, QUESTIONS, Weather, check
from openai import OpenAI
from pydantic_ai import Agent
from pydantic_ai.capabilities import NativeTool
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.native_tools import MCPServerTool

PACKAGES = ("pydantic-ai-slim",)

Model = Callable[[str], Any]


def agent_of(model: Any, weather: Weather) -> Agent[None, str]:
    agent: Agent[None, str] = Agent(model)

    @agent.tool_plain(name=NAME, description=DESCRIPTION, sequential=True)
    def tool(city: str) -> str:
        return weather(city)

    return agent


async def said(
    agent: Agent[None, str],
    question: str,
    history: list[ModelMessage],
    *,
    stream: bool,
    **more: Any,
) -> tuple[str, list[ModelMessage]]:
    if not stream:
        result = await agent.run(question, message_history=history, **more)
        return result.output, result.all_messages()
    async with agent.run_stream_events(question, message_history=history, **more) as events:
        async for event in events:
            if event.event_kind == "agent_run_result":
                return event.result.output, event.result.all_messages()
    raise AssertionError("The run has ended without a result.")


def talking(make: Model, *, stream: bool, **settings: Any) -> Callable[[str], None]:
    async def talk(model: str) -> None:
        weather = Weather()
        answers: list[str] = []
        history: list[ModelMessage] = []
        agent = agent_of(make(model), weather)
        async with agent:
            for question in QUESTIONS:
                text, history = await said(
                    agent, question, history, stream=stream, model_settings=settings
                )
                answers.append(text)
        check(weather.asked, answers)

    return lambda model: asyncio.run(talk(model))


def in_conversation(model: str) -> None:
    id = OpenAI().conversations.create().id
    talking(OpenAIResponsesModel, stream=True, openai_conversation_id=id)(model)


def with_mcp(*, stream: bool) -> Callable[[str], None]:
    async def talk(model: str) -> None:
        there = MCPServerTool(id="there", url=f"x-openai-connector:{CONNECTOR}")
        agent: Agent[None, str] = Agent(
            OpenAIResponsesModel(model), capabilities=[NativeTool(there)]
        )
        answers: list[str] = []
        history: list[ModelMessage] = []
        for question in QUESTIONS:
            text, history = await said(agent, question, history, stream=stream)
            answers.append(text)
        check(_asked(history), answers)

    return lambda model: asyncio.run(talk(model))


def _asked(history: list[ModelMessage]) -> list[str]:
    parts = [part for message in history for part in message.parts]
    calls = [part for part in parts if part.part_kind == "builtin-tool-call"]
    arguments = [call.args_as_dict() for call in calls]
    made = [each["tool_args"] for each in arguments if each.get("action") == "call_tool"]
    return [(json.loads(each) if isinstance(each, str) else each)["city"] for each in made]


def conversations() -> Iterable[tuple[str, Callable[[str], None]]]:
    chain = {"openai_previous_response_id": "auto"}
    unstored = {"openai_store": False}
    responses = OpenAIResponsesModel
    yield "pydantic-ai items sent back", talking(responses, stream=False)
    yield "pydantic-ai items sent back, streamed", talking(responses, stream=True)
    yield "pydantic-ai not stored", talking(responses, stream=True, **unstored)
    yield "pydantic-ai previous_response_id", talking(responses, stream=False, **chain)
    yield "pydantic-ai previous_response_id, streamed", talking(responses, stream=True, **chain)
    yield "pydantic-ai conversation", in_conversation
    yield "pydantic-ai background", talking(responses, stream=False, openai_background=True)
    yield "pydantic-ai WebSocket", talking(responses, stream=True, openai_transport="websocket")
    yield "pydantic-ai MCP", with_mcp(stream=False)
    yield "pydantic-ai MCP, streamed", with_mcp(stream=True)
    yield "pydantic-ai chat", talking(OpenAIChatModel, stream=False)
    yield "pydantic-ai chat, streamed", talking(OpenAIChatModel, stream=True)
    yield "pydantic-ai Anthropic", talking(AnthropicModel, stream=False)
    yield "pydantic-ai Anthropic, streamed", talking(AnthropicModel, stream=True)
