"""The adapters that are shipped, on the demo model: one batch, three voices."""

import asyncio
from typing import Any

import pytest

from tests.live.server import DEMO, SAMPLES, LiveServer

QUESTION = "What is the capital of France?"
WHICH = (None, "pirate", "json-answer")
TOKENS = 10
"""By then the base has come to its end, and each adapter has shown whose answer it is."""


def asking(adapter: str | None) -> dict[str, Any]:
    by_folder = {"adapters": str(SAMPLES / adapter)} if adapter else {}
    return {
        "model": DEMO,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "extra_body": by_folder,
    }


@pytest.fixture(scope="module")
def answers(server: LiveServer) -> list[str]:
    async def together() -> list[str]:
        async with server.openai_async() as client:
            found = await asyncio.gather(
                *(client.chat.completions.create(**asking(which)) for which in WHICH)
            )
            return [each.choices[0].message.content for each in found]

    return asyncio.run(together())


def test_each_has_its_voice(answers: list[str]) -> None:
    base, pirate, as_json = answers
    assert "Paris" in base
    assert any(word in pirate.lower() for word in ("arrr", "matey", "me "))
    assert as_json.startswith('{"answer":')
    assert len({*answers}) == 3
