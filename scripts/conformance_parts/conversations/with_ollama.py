"""Conversations of ollama, Ollama's own package, and of langchain-ollama."""

from collections.abc import Callable, Iterable
from typing import Any

from conversations.weather import (
    DESCRIPTION,
    LONG,
    NAME,
    QUESTIONS,
    SCHEMA,
    TOO_LONG,
    Weather,
    check,
    refusal,
)
from conversations.with_langchain import talking
from langchain_ollama import ChatOllama
from ollama import Client, Message, ResponseError

PACKAGES = ("ollama", "langchain-ollama")

TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA},
}


def chatting(*, stream: bool) -> Callable[[str], None]:
    def talk(model: str) -> None:
        weather, client = Weather(), Client()
        answers: list[str] = []
        said: list[Any] = []
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            while (message := answer(client, model, said, stream=stream)).tool_calls:
                said.append(message)
                for call in message.tool_calls:
                    result = weather(**call.function.arguments)
                    said.append({"role": "tool", "tool_name": NAME, "content": result})
            said.append(message)
            answers.append(message.content or "")
        check(weather.asked, answers)

    return talk


def answer(client: Client, model: str, said: list[Any], *, stream: bool) -> Message:
    if not stream:
        return client.chat(model, said, tools=[TOOL]).message
    parts = [chunk.message for chunk in client.chat(model, said, tools=[TOOL], stream=True)]
    return Message(
        role="assistant",
        content="".join(part.content or "" for part in parts),
        thinking="".join(part.thinking or "" for part in parts),
        tool_calls=[call for part in parts for call in part.tool_calls or ()],
    )


def aborted(model: str) -> None:
    said = [{"role": "user", "content": LONG}]
    for _ in Client().chat(model, said, stream=True):
        break
    assert Client().chat(model, said, options={"num_predict": 5}).message.content


def overflow(model: str) -> None:
    error = refusal(ResponseError, Client().chat, model, [{"role": "user", "content": TOO_LONG}])
    assert error.status_code == 400, error
    assert "maximum context length" in error.error, error


def conversations() -> Iterable[tuple[str, Callable[[str], None]]]:
    yield "ollama", chatting(stream=False)
    yield "ollama, streamed", chatting(stream=True)
    yield "langchain-ollama", talking(stream=False, kind=ChatOllama)
    yield "langchain-ollama, streamed", talking(stream=True, kind=ChatOllama)
    yield "langchain-ollama thinking", talking(stream=True, kind=ChatOllama, reasoning=True)


ONCE = {"an abort, and on": aborted, "an overflow": overflow}
