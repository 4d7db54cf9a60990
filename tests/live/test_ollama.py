"""Ollama's own client against a live server: answers, streams, tools, thoughts, loading."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ollama
import pytest
from ollama import ChatResponse, Client, ResponseError

from tests.live.common import Models, common_models, transcript
from tests.live.server import LiveServer

THINKER, PLAIN = "thinker", "plain-one"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ENTRIES: list[dict[str, Any]] = [
    {"match": "poem", "output": "Grüezi, 世界! 🙂"},
    {"match": "think", "output": "<think>\nHm, well.\n</think>\n\nIt is so."},
    {"match": "weather", "output": f"<think>\nI look.\n</think>\n\n{CALL}"},
    {"match": "weather", "output": "It rains in Paris."},
    {"match": "city", "output": '{"name": "Paris", "people": 2}'},
]
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["name", "people"],
}


def get_weather(city: str) -> str:
    """How the weather is in a city.

    Args:
        city: The city's name.
    """
    return f"It rains in {city}."


@common_models
def models(folder: Path, _: object) -> Models:
    transcript(folder / "said.jsonl", ENTRIES)
    families = {THINKER: "qwen3", PLAIN: "plain"}
    return {id: {"source": "replay:said.jsonl", "family": it} for id, it in families.items()}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[Client]:
    with Client(host=server.url) as client:
        yield client


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_an_answer(client: Client) -> None:
    found = client.chat(PLAIN, user("poem"))
    assert found.message.content == ENTRIES[0]["output"]
    assert (found.done, found.done_reason) == (True, "stop")
    assert found.eval_count
    assert found.prompt_eval_count
    assert found.total_duration == sum(
        part or 0 for part in (found.load_duration, found.prompt_eval_duration, found.eval_duration)
    )


def test_thoughts(client: Client) -> None:
    message = client.chat(THINKER, user("think"), think=True).message
    assert (message.thinking, message.content) == ("Hm, well.", "It is so.")
    chunks = list(client.chat(THINKER, user("think"), think="low", stream=True))
    assert "".join(chunk.message.thinking or "" for chunk in chunks) == "Hm, well."
    generated = client.generate(THINKER, "think", think=True)
    assert (generated.thinking, generated.response) == ("Hm, well.", "It is so.")


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_with_a_tool(client: Client, stream: bool) -> None:
    ask: Any = partial(client.chat, THINKER, tools=[get_weather], stream=stream)
    messages: list[Any] = user("weather")
    first = one(ask(messages))
    assert first.thinking == "I look."
    (call,) = first.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    result = get_weather(**call.function.arguments)
    messages += [first, {"role": "tool", "tool_name": "get_weather", "content": result}]
    last = one(ask(messages))
    assert (last.content, last.tool_calls) == ("It rains in Paris.", None)


def one(answer: Any) -> Any:
    """The message of an answer, or that of all the chunks of its stream."""
    if isinstance(answer, ChatResponse):
        return answer.message
    chunks = [chunk.message for chunk in answer]
    return ollama.Message(
        role="assistant",
        content="".join(chunk.content or "" for chunk in chunks),
        thinking="".join(chunk.thinking or "" for chunk in chunks) or None,
        tool_calls=[call for chunk in chunks for call in chunk.tool_calls or ()] or None,
    )


def test_a_schema_is_held(client: Client) -> None:
    found = client.chat(PLAIN, user("city"), format=CITY)
    assert json.loads(found.message.content or "") == {"name": "Paris", "people": 2}
    with pytest.raises(ResponseError, match="entry 1 of") as caught:
        client.chat(PLAIN, user("poem"), format=CITY)
    assert caught.value.status_code == 400


def test_errors_are_the_clients_own(client: Client) -> None:
    for ask in (client.chat, client.generate, client.show):
        with pytest.raises(ResponseError, match="not served here") as caught:
            ask("other")
        assert caught.value.status_code == 404
    for change in (client.pull, client.push, client.delete):
        with pytest.raises(ResponseError, match="Its owner can") as caught:
            change(PLAIN)
        assert caught.value.status_code == 403
    with pytest.raises(ResponseError, match="generates text"):
        client.embed(PLAIN, "x")
    with pytest.raises(ResponseError, match=r"options\.temperature"):
        client.chat(PLAIN, user("poem"), options={"temperature": "hot"})
