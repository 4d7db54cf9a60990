"""Families, as replay models, through the whole server and OpenAI's client.

Golden outputs are played next to each other, streamed or not, in turns; what must come out is what
they read as. The families differ in more than their delimiters: tests/families reads the outputs of
all, however they are cut.
"""

import asyncio
import json
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.api.strict import assert_strict
from tests.contract.pairs import PAIRED
from tests.live.common import Models, common_models, transcript
from tests.live.server import LiveServer

GOLDEN = Path(__file__).parents[1] / "families" / "golden"
TOOLS = yaml.load((GOLDEN / "tools.yaml").read_text("utf-8"), yaml.CSafeLoader)
MOST = 4
TOGETHER = 8

Case = dict[str, Any]


def cases(family: str) -> list[Case]:
    found: list[Case] = yaml.load(
        (GOLDEN / family / "outputs.yaml").read_text("utf-8"), yaml.CSafeLoader
    )
    return found[:: max(1, len(found) // MOST)]


def entry(case: Case) -> dict[str, Any]:
    return {
        "match": case["name"],
        "output": case["output"],
        "finish": "length" if case.get("cut") else "stop",
        "generation_prompt": case.get("prompt_end", ""),
    }


@common_models
def models(folder: Path, _: object) -> Models:
    for name in PAIRED:
        transcript(folder / f"{name}.jsonl", map(entry, cases(name)))
    return {f"golden-{name}": {"source": f"replay:{name}.jsonl", "family": name} for name in PAIRED}


@dataclass
class Read:
    """An answer, as a client puts it together."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments."""
    ids: set[str] = field(default_factory=set)
    end: str | None = None


def whole(completion: ChatCompletion) -> Read:
    assert_strict(ChatCompletion, completion.to_dict(mode="json"))
    (choice,) = completion.choices
    message: Any = choice.message
    calls = message.tool_calls or []
    reasoning = getattr(message, "reasoning_content", "")
    assert getattr(message, "reasoning", "") == reasoning
    details = completion.usage and completion.usage.completion_tokens_details
    assert details
    assert (details.reasoning_tokens or 0) > 0 or not reasoning
    return Read(
        text=message.content or "",
        reasoning=reasoning,
        calls=[[call.function.name, call.function.arguments] for call in calls],
        ids={call.id for call in calls},
        end=choice.finish_reason,
    )


def streamed(chunks: list[ChatCompletionChunk]) -> Read:
    read = Read()
    for chunk in chunks:
        assert_strict(ChatCompletionChunk, chunk.to_dict(mode="json"))
        for choice in chunk.choices:
            delta: Any = choice.delta
            read.text += delta.content or ""
            read.reasoning += getattr(delta, "reasoning_content", "")
            for call in delta.tool_calls or []:
                if call.id:
                    assert call.index == len(read.calls)
                    read.calls.append([call.function.name, ""])
                    read.ids.add(call.id)
                read.calls[call.index][1] += call.function.arguments
            read.end = choice.finish_reason or read.end
    return read


def asked(family: str, case: Case) -> dict[str, Any]:
    messages = [{"role": "user", "content": case["name"]}]
    return {"model": f"golden-{family}", "messages": messages, "tools": TOOLS, "max_tokens": 4000}


def check(case: Case, read: Read) -> None:
    """No grammar holds recorded calls, so a stream shows none that is not whole."""
    reads = case["reads"]
    calls = reads.get("calls", [])
    if not reads.get("text") and read.text == read.reasoning.strip():
        read.text = ""  # an answer that is all reasoning is reported as the text too
    assert (read.text, read.reasoning) == (reads.get("text", ""), reads.get("reasoning", ""))
    assert len(read.calls) == len(calls)
    assert len(read.ids) == len(read.calls)
    made = [(name, json.loads(arguments)) for name, arguments in read.calls if _whole(arguments)]
    wanted = [(call["name"], call.get("arguments", {})) for call in calls]
    assert made[: len(wanted)] == wanted
    if case.get("cut"):
        assert read.end == "length"
    else:
        assert read.end == ("tool_calls" if calls else "stop")


def _whole(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("family", PAIRED)
def test_streamed_or_not_and_next_to_each_other(server: LiveServer, family: str) -> None:
    async def all_of_them() -> None:
        places = asyncio.Semaphore(TOGETHER)
        async with server.openai_async() as client:

            async def one(case: Case, stream: bool) -> None:
                async with places:
                    answer: Any = await client.chat.completions.create(
                        stream=stream, **asked(family, case)
                    )
                    read = streamed([chunk async for chunk in answer]) if stream else whole(answer)
                check(case, read)

            turns = islice(cycle([True, False]), PAIRED.index(family) % 2, None)
            await asyncio.gather(*map(one, cases(family), turns))

    asyncio.run(all_of_them())


# Anthropic's Messages
