"""Answers of another server: the owner's defaults, and several answers as one stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from dataclasses import replace

import pytest

from mlx_server.errors import UpstreamFailed
from mlx_server.events import Event, TextDelta
from mlx_server.generation.upstream import merged, with_defaults
from mlx_server.messages import Conversation, Message
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import GenerateRequest

OWNED = ModelSpec(
    "m",
    "openai+http://host/v1",
    max_tokens=9,
    choices={"temperature": 0.5, "top_k": 5},
    template_kwargs={"color": "red", "size": 1},
)
CHAT = Conversation(
    (Message("user", "Hi"),), template_kwargs={"size": 2}, response_format={"type": "json_object"}
)


def test_the_owner_says_what_the_client_does_not() -> None:
    request = GenerateRequest("m", (CHAT, "Hi"), choices={"temperature": 0.9})
    found = with_defaults(OWNED, request)
    assert found.choices == {"temperature": 0.9, "top_k": 5}
    assert found.max_tokens == 9
    assert found.prompts == (replace(CHAT, template_kwargs={"color": "red", "size": 2}), "Hi")
    assert with_defaults(OWNED, replace(request, max_tokens=3)).max_tokens == 3


class Streams:
    """Answers of which the first waits for the others."""

    def __init__(self) -> None:
        self.closed: list[int] = []
        self.others = asyncio.Event()

    async def of(self, index: int, *, fails: bool = False) -> AsyncGenerator[Event]:
        try:
            if not index:
                await self.others.wait()
            yield TextDelta(index, "a")
            self.others.set()
            if fails:
                raise UpstreamFailed("gone")
            yield TextDelta(index, "b")
        finally:
            self.closed.append(index)


def test_each_event_comes_as_soon_as_it_is_there() -> None:
    async def read() -> list[str]:
        streams = Streams()
        both = merged([streams.of(0), streams.of(1)])
        found = [f"{e.index}{e.text}" async for e in both if isinstance(e, TextDelta)]
        assert sorted(streams.closed) == [0, 1]
        return found

    found = asyncio.run(asyncio.wait_for(read(), 20))
    assert found[0] == "1a", "it does not wait for the first answer"
    assert sorted(found) == ["0a", "0b", "1a", "1b"]


@pytest.mark.parametrize("fails", [True, False])
def test_all_answers_end_with_one_that_fails_or_a_client_that_leaves(fails: bool) -> None:
    async def read() -> list[int]:
        streams = Streams()
        streams.others.set()
        never = asyncio.Event()

        async def waiting() -> AsyncGenerator[Event]:
            try:
                yield TextDelta(2, "a")
                await never.wait()
            finally:
                streams.closed.append(2)

        async with aclosing(merged([waiting(), streams.of(1, fails=fails)])) as both:
            with pytest.raises(UpstreamFailed) if fails else nullcontext():
                async for event in both:
                    if not fails and event == TextDelta(1, "a"):
                        break
        return sorted(streams.closed)

    assert asyncio.run(asyncio.wait_for(read(), 20)) == [1, 2]
