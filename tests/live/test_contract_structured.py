"""A few answers of a model that talks nonsense, held to schemas and tools; scripts/structured asks
the demo model for many."""

import asyncio

import httpx

from tests.contract.answers import PATH
from tests.contract.structured import CALLS, SCHEMAS, CheckedText, body, judged
from tests.live.server import PLAIN, SHALLOW, LiveServer

SHORT = 110
"""Tokens, which are enough for all but the form of 40 properties."""
CASES = [case for case in SCHEMAS if case != "40 properties"]
ASKED = [*((case, 0) for case in CASES), (CALLS, 0), (CALLS, 2)]


def test_answers_are_valid_and_come_to_their_end(server: LiveServer) -> None:
    async def all_of_them() -> list[CheckedText]:
        async with httpx.AsyncClient(**PLAIN, base_url=server.url, timeout=300) as http:

            async def one(case: str, number: int) -> CheckedText:
                asking = {**body(case, number), "model": SHALLOW, "max_tokens": SHORT}
                response = await http.post(PATH, json=asking)
                return judged(case, response.raise_for_status().json())

            return await asyncio.gather(*(one(*each) for each in ASKED))

    assert [reported for reported in asyncio.run(all_of_them()) if reported.fault] == []
