"""Families, as replay models, through the whole server and OpenAI's client.

Golden outputs are played next to each other, streamed or not, in turns; what must come out is what
they read as. The families differ in more than their delimiters: tests/families reads the outputs of
all, however they are cut.
"""

import asyncio
import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.api.strict import assert_strict
from tests.contract.answers import Answer
from tests.contract.pairs import PAIRED
from tests.live.chats import answer_of
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


def read(found: ChatCompletion | list[ChatCompletionChunk]) -> Answer:
    if isinstance(found, ChatCompletion):
        assert_strict(ChatCompletion, found.to_dict(mode="json"))
        message: Any = found.choices[0].message
        reasoning = getattr(message, "reasoning_content", "")
        assert getattr(message, "reasoning", "") == reasoning
        details = found.usage and found.usage.completion_tokens_details
        assert details
        assert (details.reasoning_tokens or 0) > 0 or not reasoning
    else:
        for chunk in found:
            assert_strict(ChatCompletionChunk, chunk.to_dict(mode="json"))
    return answer_of(found)


def asked(family: str, case: Case) -> dict[str, Any]:
    messages = [{"role": "user", "content": case["name"]}]
    return {"model": f"golden-{family}", "messages": messages, "tools": TOOLS, "max_tokens": 4000}


def check(case: Case, answer: Answer) -> None:
    """No grammar holds recorded calls, so a stream shows none that is not whole."""
    reads = case["reads"]
    calls = reads.get("calls", [])
    if not reads.get("text") and answer.text == answer.reasoning.strip():
        answer.text = ""  # an answer that is all reasoning is reported as the text too
    assert (answer.text, answer.reasoning) == (reads.get("text", ""), reads.get("reasoning", ""))
    assert len(answer.calls) == len(calls)
    made = [(name, json.loads(arguments)) for name, arguments in answer.calls if _whole(arguments)]
    wanted = [(call["name"], call.get("arguments", {})) for call in calls]
    assert made[: len(wanted)] == wanted
    if case.get("cut"):
        assert answer.finish == "length"
    else:
        assert answer.finish == ("tool_calls" if calls else "stop")


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
                    found = [chunk async for chunk in answer] if stream else answer
                check(case, read(found))

            turns = islice(cycle([True, False]), PAIRED.index(family) % 2, None)
            await asyncio.gather(*map(one, cases(family), turns))

    asyncio.run(all_of_them())
