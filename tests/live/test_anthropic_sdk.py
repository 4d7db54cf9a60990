"""The server as Anthropic's own client sees it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic, beta_tool
from anthropic.types import Message, MessageParam
from pydantic import BaseModel

from tests.live.common import Models, common_models, transcript
from tests.live.server import TINY, LiveServer

FAKE = "runs-tools"
THINKING = "<think>\nI should look it up.\n</think>\n\n"


def call(city: str) -> str:
    asked = json.dumps({"name": "get_weather", "arguments": {"city": city}}, ensure_ascii=False)
    return f"<tool_call>\n{asked}\n</tool_call>"


ENTRIES: list[dict[str, Any]] = [
    {"match": "poem", "output": "Roses are red."},
    {"output": f"{THINKING}I look.\n{call('Zürich')}\n{call('Bern')}"},
    {"output": f"{THINKING}{call('Chur')}"},
    {"output": "Chur is the warmest."},
]


@common_models
def models(folder: Path, _: object) -> Models:
    transcript(folder / "said.jsonl", ENTRIES)
    return {FAKE: {"source": "replay:said.jsonl", "family": "qwen3"}}


@pytest.fixture
def client(server: LiveServer) -> Iterator[Anthropic]:
    with server.anthropic() as client:
        yield client


def user(text: str) -> MessageParam:
    return {"role": "user", "content": text}


def ask(client: Anthropic, text: str = "poem", **more: Any) -> Message:
    asked = {"model": FAKE, "max_tokens": 200, "messages": [user(text)], **more}
    found: Message = client.messages.create(**asked)
    return found


def prompt_tokens(message: Message) -> int:
    usage = message.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return usage.input_tokens + cached


def test_the_tool_runner_has_its_conversation(client: Anthropic) -> None:
    """Thoughts with their signatures, calls in parallel, and a result that is an error."""
    asked: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """How the weather is in a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        if city == "Bern":
            raise ValueError("there is no station")
        return "18 degrees"

    runner = client.beta.messages.tool_runner(
        model=FAKE,
        max_tokens=400,
        tools=[get_weather],
        messages=[{"role": "user", "content": "Where is it the warmest?"}],
        thinking={"type": "adaptive"},
    )
    first, second, last = list(runner)
    assert asked == ["Zürich", "Bern", "Chur"]
    kinds = [block.type for block in first.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "tool_use")
    assert [block.type for block in last.content] == ["text"]
    assert last.stop_reason == "end_turn"


class City(BaseModel):
    name: str
    sights: list[str]


def test_structured_outputs(client: Anthropic) -> None:
    """By random weights: it is the grammar that keeps the schema."""
    asked: Any = {"model": TINY, "max_tokens": 300, "messages": [user("Tell me about Paris.")]}
    found = client.messages.parse(**asked, output_format=City)
    assert isinstance(found.parsed_output, City)
    with client.messages.stream(**asked, output_format=City) as stream:
        assert isinstance(stream.get_final_message().parsed_output, City)


def test_what_the_next_turn_finds_in_the_prompt_cache(client: Anthropic) -> None:
    cached: Any = {"cache_control": {"type": "ephemeral"}}
    text = "Here is a text that is long enough to be kept. " * 5
    first = ask(client, text, model=TINY, max_tokens=5, **cached)
    assert first.usage.cache_read_input_tokens == 0
    before = prompt_tokens(first)
    assert first.usage.cache_creation_input_tokens == before - 1
    content: Any = [block.to_dict() for block in first.content]
    turns = [user(text), {"role": "assistant", "content": content}, user("And?")]
    second = ask(client, messages=turns, model=TINY, max_tokens=5, **cached)
    read = second.usage.cache_read_input_tokens or 0
    assert before <= read < prompt_tokens(second)
    assert second.usage.cache_creation_input_tokens == prompt_tokens(second) - 1 - read
    plain = ask(client, text, model=TINY, max_tokens=5)
    assert plain.usage.cache_creation_input_tokens == 0
