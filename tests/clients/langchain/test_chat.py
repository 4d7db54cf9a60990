"""ChatMLX as LangChain's users see it; scripts/conformance runs LangChain's own tests on it."""

import asyncio
from functools import reduce
from operator import add
from typing import Any

import openai
import pytest

from mlx_server.clients.langchain import ChatMLX
from mlx_server.errors import GenerationFailed
from tests.clients.langchain.made import USAGE
from tests.clients.recorded import Wire, call, chunks, recorded


def streamed() -> list[Wire]:
    pieces: list[Wire] = [
        {"reasoning_content": "Pa"},
        {"reasoning_content": "ris?"},
        {"content": "Let me "},
        {"content": "see."},
        {"tool_calls": [{"index": 0, **call("get_weather", "")}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
    ]
    return [*chunks(*pieces, reason="tool_calls"), {"choices": [], "usage": USAGE, "model": "m"}]


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_stream_adds_up_to_the_message(version: str, awaited: bool) -> None:
    async def gathered(llm: ChatMLX) -> list[Any]:
        return [each async for each in llm.astream("Weather?")]

    with recorded(streamed()) as server:
        llm = ChatMLX(model="m", base_url=server.url, output_version=version)
        pieces = asyncio.run(gathered(llm)) if awaited else list(llm.stream("Weather?"))
    found = reduce(add, pieces)
    assert found.text == "Let me see."
    assert found.additional_kwargs["thinking"] == "Paris?"
    kinds = [each["type"] for each in found.content_blocks]
    assert kinds == ["reasoning", "text", "tool_call"]
    assert [each["args"] for each in found.tool_calls] == [{"city": "Paris"}]
    assert found.usage_metadata
    assert found.usage_metadata["total_tokens"] == 12
    assert server.requests[0]["stream_options"] == {"include_usage": True}


def test_errors_name_what_was_wrong() -> None:
    with recorded({"error": {"message": "no such model"}}, {"choices": []}) as server:
        llm = ChatMLX(model="m", base_url=server.url, max_retries=0)
        with pytest.raises(openai.BadRequestError, match="no such model"):
            llm.invoke("Is it?")
        with pytest.raises(GenerationFailed, match="no `choices`"):
            llm.invoke("Is it?")
    with recorded([{"choices": [{"index": 0, "delta": {"content": "Ye"}}]}]) as server:
        cut = ChatMLX(model="m", base_url=server.url).stream("Is it?")
        with pytest.raises(GenerationFailed, match="before the answer did"):
            list(cut)
