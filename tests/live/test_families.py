"""Every family, as a replay model, through the whole server and OpenAI's own client.

What is played are the golden outputs; what must come out is what they read as: streamed, one
after another, and not streamed, next to each other.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mlx_server.families import FAMILIES
from tests.api.strict import assert_strict
from tests.live.server import LiveServer, serving

GOLDEN = Path(__file__).parents[1] / "families" / "golden"
TOOLS = yaml.load((GOLDEN / "tools.yaml").read_text("utf-8"), yaml.CSafeLoader)
NAMES = [family.name for family in FAMILIES]
TOGETHER = 8

Case = dict[str, Any]


def cases(family: str) -> list[Case]:
    found: list[Case] = yaml.load(
        (GOLDEN / family / "outputs.yaml").read_text("utf-8"), yaml.CSafeLoader
    )
    return found


def entry(case: Case) -> dict[str, Any]:
    return {
        "match": case["name"],
        "output": case["output"],
        "finish": "length" if case.get("cut") else "stop",
        "generation_prompt": case.get("prompt_end", ""),
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("families")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLX_SERVER_CACHE", str(folder / "cache"))
        for name in NAMES:
            entries = [json.dumps(entry(case)) for case in cases(name)]
            (folder / f"{name}.jsonl").write_text("\n".join(entries), "utf-8")
        models = {
            name: {
                "source": f"replay:{name}.jsonl",
                "family": name,
                "lead_on": False,
                "repair": {"promote_reasoning": False},
            }
            for name in NAMES
        }
        with serving(folder, {"models": models}) as server:
            yield server
            assert "Traceback" not in server.log
            assert " ERROR " not in server.log


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


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
    return {"model": family, "messages": messages, "tools": TOOLS, "max_tokens": 4000}


def check(case: Case, read: Read, *, unfinished: int) -> None:
    """unfinished: calls that were begun and are no calls: a stream has shown them."""
    reads = case["reads"]
    calls = reads.get("calls", [])
    assert (read.text, read.reasoning) == (reads.get("text", ""), reads.get("reasoning", ""))
    assert len(read.calls) == len(calls) + unfinished
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


EVERY = [
    pytest.param(name, case, id=f"{name}-{case['name']}") for name in NAMES for case in cases(name)
]


@pytest.mark.parametrize(("family", "case"), EVERY)
def test_streamed(client: OpenAI, family: str, case: Case) -> None:
    chunks: Any = client.chat.completions.create(stream=True, **asked(family, case))
    check(case, streamed(list(chunks)), unfinished=len(case["reads"].get("unfinished", [])))


@pytest.mark.parametrize("family", NAMES)
def test_not_streamed_and_next_to_each_other(server: LiveServer, family: str) -> None:
    async def all_of_them() -> None:
        places = asyncio.Semaphore(TOGETHER)
        async with server.openai_async() as client:

            async def one(case: Case) -> None:
                async with places:
                    completion: Any = await client.chat.completions.create(**asked(family, case))
                    check(case, whole(completion), unfinished=0)

            await asyncio.gather(*map(one, cases(family)))

    asyncio.run(all_of_them())
