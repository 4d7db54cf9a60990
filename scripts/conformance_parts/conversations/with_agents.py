"""Conversations of OpenAI's Agents SDK."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from agents import (
    Agent,
    HostedMCPTool,
    MCPToolApprovalRequest,
    ModelSettings,
    OpenAIConversationsSession,
    OpenAIProvider,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    responses_websocket_session,
)
from agents.result import RunResultBase
from conversations.weather import CONNECTOR, DESCRIPTION, NAME, QUESTIONS, Weather, check

PACKAGES = ("openai-agents",)

Run = Callable[..., Awaitable[RunResultBase]]
"""Runs an agent with its input."""
Talk = Callable[[Run, Agent[Any], Weather], Coroutine[Any, Any, None]]

LOOP = asyncio.Runner()
"""One event loop for all, since the SDK keeps its connections."""


async def whole(agent: Agent[Any], text: Any, **more: Any) -> RunResultBase:
    return await Runner.run(agent, text, **more)


async def streamed(agent: Agent[Any], text: Any, **more: Any) -> RunResultBase:
    return await _drained(Runner.run_streamed(agent, text, **more))


async def _drained(result: Any) -> RunResultBase:
    async for _ in result.stream_events():
        pass
    found: RunResultBase = result
    return found


def agent_of(model: str, weather: Weather, **settings: Any) -> Agent[Any]:
    @function_tool(name_override=NAME, description_override=DESCRIPTION)
    def tool(city: str) -> str:
        return weather(city)

    return Agent("weather", model=model, tools=[tool], model_settings=ModelSettings(**settings))


async def items_sent_back(run: Run, agent: Agent[Any], weather: Weather) -> None:
    answers: list[str] = []
    said: list[Any] = []
    for question in QUESTIONS:
        result = await run(agent, [*said, {"role": "user", "content": question}])
        said = result.to_input_list()
        answers.append(result.final_output)
    check(weather.asked, answers)


async def chained(run: Run, agent: Agent[Any], weather: Weather) -> None:
    answers: list[str] = []
    before: str | None = None
    for question in QUESTIONS:
        more = {"previous_response_id": before, "auto_previous_response_id": True}
        result = await run(agent, question, **more)
        before = result.last_response_id
        answers.append(result.final_output)
    check(weather.asked, answers)


async def with_session(
    make: Callable[[], Any], run: Run, agent: Agent[Any], weather: Weather
) -> None:
    session = make()
    results = [await run(agent, question, session=session) for question in QUESTIONS]
    check(weather.asked, [result.final_output for result in results])
    await session.clear_session()


def through(talk: Talk, run: Run, **settings: Any) -> Callable[[str], None]:
    def conversation(model: str) -> None:
        weather = Weather()
        agent = agent_of(model, weather, **settings)
        config = RunConfig(model_provider=OpenAIProvider(use_responses=True))
        LOOP.run(talk(partial(run, run_config=config), agent, weather))

    return conversation


def over_a_socket(talk: Talk, *, stream: bool, **settings: Any) -> Callable[[str], None]:
    def conversation(model: str) -> None:
        LOOP.run(on_one_line(model, talk, stream=stream, **settings))

    return conversation


async def on_one_line(model: str, talk: Talk, *, stream: bool, **settings: Any) -> None:
    async with responses_websocket_session() as session:

        async def run(agent: Agent[Any], text: Any, **more: Any) -> RunResultBase:
            if stream:
                return await _drained(session.run_streamed(agent, text, **more))
            return await session.run(agent, text, **more)

        weather = Weather()
        await talk(run, agent_of(model, weather, **settings), weather)


def hosted_mcp(run: Run, *, approval: bool) -> Callable[[str], None]:
    async def talk(model: str) -> None:
        granted: list[str] = []

        def grant(request: MCPToolApprovalRequest) -> Any:
            granted.append(request.data.name)
            return {"approve": True}

        asked = "always" if approval else "never"
        config: Any = {
            "type": "mcp",
            "server_label": "there",
            "connector_id": CONNECTOR,
            "require_approval": asked,
        }
        tool = HostedMCPTool(config, on_approval_request=grant if approval else None)
        agent = Agent("weather", model=model, tools=[tool])
        said: list[Any] = []
        cities: list[str] = []
        answers: list[str] = []
        for question in QUESTIONS:
            result = await run(agent, [*said, {"role": "user", "content": question}])
            said = result.to_input_list()
            answers.append(result.final_output)
        for item in said:
            if item.get("type") == "mcp_call":
                cities.append(json.loads(item["arguments"])["city"])
        check(cities, answers)
        assert len(granted) == (len(cities) if approval else 0), granted

    return lambda model: LOOP.run(talk(model))


def conversations() -> Iterable[tuple[str, Callable[[str], None]]]:
    unstored: dict[str, Any] = {"store": False, "response_include": ["reasoning.encrypted_content"]}
    remembered = partial(with_session, OpenAIConversationsSession)
    kept = partial(with_session, lambda: SQLiteSession("weather"))
    yield "openai-agents items sent back", through(items_sent_back, whole)
    yield "openai-agents items sent back, streamed", through(items_sent_back, streamed)
    yield "openai-agents not stored, streamed", through(items_sent_back, streamed, **unstored)
    yield "openai-agents previous_response_id", through(chained, whole)
    yield "openai-agents previous_response_id, streamed", through(chained, streamed)
    yield "openai-agents session", through(kept, streamed)
    yield "openai-agents conversation", through(remembered, whole)
    yield "openai-agents WebSocket", over_a_socket(chained, stream=False)
    yield "openai-agents WebSocket, streamed", over_a_socket(items_sent_back, stream=True)
    yield "openai-agents WebSocket, not stored", over_a_socket(chained, stream=True, store=False)
    yield "openai-agents MCP", hosted_mcp(whole, approval=False)
    yield "openai-agents MCP, streamed", hosted_mcp(streamed, approval=False)
    yield "openai-agents MCP with approvals", hosted_mcp(whole, approval=True)
