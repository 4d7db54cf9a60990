"""Conversations of OpenAI's own client."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from conversations.weather import (
    ANSWERS,
    CITIES,
    CONNECTOR,
    DESCRIPTION,
    LONG,
    NAME,
    QUESTIONS,
    SCHEMA,
    TOO_LONG,
    Weather,
    check,
    check_cached,
    refusal,
)
from openai import BadRequestError, OpenAI
from openai.types.responses import Response

PACKAGES = ("openai",)

Ask = Callable[..., Response]
"""Sends a request with these fields."""

TOOL: Any = {"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}
STRICT = {**TOOL, "strict": True}
CHAT_TOOL: Any = {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}
MCP: Any = {"type": "mcp", "server_label": "there", "connector_id": CONNECTOR}


def whole(client: OpenAI, **asked: Any) -> Response:
    return client.responses.create(**asked)


def streamed(client: OpenAI, **asked: Any) -> Response:
    with client.responses.stream(**asked) as stream:
        return stream.get_final_response()


def called(response: Response, weather: Weather) -> list[Any]:
    """Calls what the response asks for, and returns the results as items."""
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": weather(**json.loads(call.arguments)),
        }
        for call in calls
    ]


def last_text(response: Response) -> str:
    assert response.status == "completed", response.status
    messages = [item for item in response.output if item.type == "message"]
    return "".join(part.text for part in messages[-1].content if part.type == "output_text")


def chained(ask: Ask, tool: Any = STRICT) -> None:
    """Continues stored responses, so that the server remembers the conversation."""
    weather, answers = Weather(), []
    before: dict[str, Any] = {}
    for question in QUESTIONS:
        response = ask(input=question, tools=[tool], **before)
        while results := called(response, weather):
            response = ask(input=results, tools=[tool], previous_response_id=response.id)
        before = {"previous_response_id": response.id}
        answers.append(last_text(response))
    check(weather.asked, answers)


def in_conversation(client: OpenAI, ask: Ask) -> None:
    """Continues a stored conversation, whose items the server returns."""
    weather, answers = Weather(), []
    conversation = client.conversations.create(metadata={"about": "weather"})
    for question in QUESTIONS:
        response = ask(input=question, tools=[TOOL], conversation=conversation.id)
        while results := called(response, weather):
            response = ask(input=results, tools=[TOOL], conversation=conversation.id)
        answers.append(last_text(response))
    check(weather.asked, answers)
    items = list(client.conversations.items.list(conversation.id, order="asc"))
    outputs = [item.output for item in items if item.type == "function_call_output"]
    assert outputs == ["18 degrees", "16 degrees", "21 degrees"], outputs
    client.conversations.delete(conversation.id)


def sent_back(ask: Ask) -> None:
    """Sends the whole conversation back, reasoning too; nothing is stored."""
    weather, answers = Weather(), []
    said: list[Any] = []
    include = ["reasoning.encrypted_content"]
    for question in QUESTIONS:
        said.append({"role": "user", "content": question})
        while True:
            response = ask(input=said, tools=[TOOL], store=False, include=include)
            said += [item.model_dump() for item in response.output]
            results = called(response, weather)
            said += results
            if not results:
                break
        answers.append(last_text(response))
    check(weather.asked, answers)


def over_a_socket(client: OpenAI, model: str) -> None:
    with client.responses.connect() as line:

        def ask(**asked: Any) -> Response:
            line.response.create(model=model, store=False, **asked)
            for event in line:
                if event.type == "response.completed":
                    return event.response
                assert event.type not in ("error", "response.failed"), event
            raise AssertionError("The connection has ended.")

        chained(ask)


def with_mcp(ask: Ask) -> None:
    """Has the server call the tool itself."""
    tool = {**MCP, "require_approval": "never"}
    asked, answers = [], []
    before: dict[str, Any] = {}
    for question in QUESTIONS:
        response = ask(input=question, tools=[tool], **before)
        before = {"previous_response_id": response.id}
        asked += cities_of(response)
        answers.append(last_text(response))
    check(asked, answers)


def with_approvals(ask: Ask) -> None:
    asked, answers = [], []
    before: dict[str, Any] = {}
    for question in QUESTIONS:
        response = ask(input=question, tools=[MCP], **before)
        while granted := approvals(response):
            before = {"previous_response_id": response.id}
            response = ask(input=granted, tools=[MCP], **before)
            asked += cities_of(response)
            assert len(asked) <= len(CITIES), asked
        before = {"previous_response_id": response.id}
        answers.append(last_text(response))
    check(asked, answers)


def approvals(response: Response) -> list[Any]:
    return [
        {"type": "mcp_approval_response", "approval_request_id": item.id, "approve": True}
        for item in response.output
        if item.type == "mcp_approval_request"
    ]


def cities_of(response: Response) -> list[str]:
    calls = [item for item in response.output if item.type == "mcp_call"]
    assert all(call.output and call.error is None for call in calls), calls
    return [json.loads(call.arguments)["city"] for call in calls]


def in_the_background(client: OpenAI, model: str) -> None:
    def ask(**asked: Any) -> Response:
        stream = client.responses.create(model=model, background=True, stream=True, **asked)
        with stream:
            first = next(iter(stream))
        assert first.type == "response.created", first
        again = client.responses.retrieve(first.response.id, stream=True)
        for event in again:
            if event.type == "response.completed":
                return event.response
        raise AssertionError("The stream has ended.")

    chained(ask)


def chat(client: OpenAI, model: str, *, stream: bool) -> None:
    weather, answers = Weather(), []
    said: list[Any] = []
    for question in QUESTIONS:
        said.append({"role": "user", "content": question})
        while True:
            message = _said(client, model, said, stream=stream)
            said.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                result = weather(**json.loads(call.function.arguments))
                said.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break
        answers.append(message.content)
    assert len(answers) == len(ANSWERS)
    check(weather.asked, answers)


def _said(client: OpenAI, model: str, messages: list[Any], *, stream: bool) -> Any:
    asked: Any = {"model": model, "messages": messages, "tools": [CHAT_TOOL]}
    if not stream:
        return client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as events:
        return events.get_final_completion().choices[0].message


def say(model: str, *said: Any) -> Any:
    return OpenAI().chat.completions.create(model=model, messages=list(said), max_tokens=5)


def aborted(model: str) -> None:
    asked: Any = {"role": "user", "content": LONG}
    with OpenAI().chat.completions.create(model=model, messages=[asked], stream=True) as stream:
        next(iter(stream))
    assert say(model, asked).choices


def repeated(model: str) -> None:
    asked = {"role": "user", "content": LONG}
    first = say(model, asked)
    then = say(model, asked, first.choices[0].message, {"role": "user", "content": "And then?"})
    check_cached(then.usage.prompt_tokens_details.cached_tokens, first.usage.prompt_tokens)


def overflow(model: str) -> None:
    error = refusal(BadRequestError, say, model, {"role": "user", "content": TOO_LONG})
    assert error.code == "context_length_exceeded", error


def conversations() -> Iterable[tuple[str, Callable[[str], None]]]:
    client = OpenAI()

    def asking(how: Callable[..., Response], talk: Callable[[Ask], None]) -> Callable[[str], None]:
        return lambda model: talk(partial(how, client, model=model))

    yield "openai previous_response_id", asking(whole, chained)
    yield "openai previous_response_id, streamed", asking(streamed, chained)
    yield "openai conversation", asking(streamed, partial(in_conversation, client))
    yield "openai items sent back", asking(whole, sent_back)
    yield "openai items sent back, streamed", asking(streamed, sent_back)
    yield "openai WebSocket", lambda model: over_a_socket(client, model)
    yield "openai background", lambda model: in_the_background(client, model)
    yield "openai MCP", asking(whole, with_mcp)
    yield "openai MCP, streamed", asking(streamed, with_mcp)
    yield "openai MCP with approvals", asking(streamed, with_approvals)
    yield "openai chat", lambda model: chat(client, model, stream=False)
    yield "openai chat, streamed", lambda model: chat(client, model, stream=True)


ONCE = {
    "an abort, and on": aborted,
    "a second turn, with the first one cached": repeated,
    "an overflow": overflow,
}
