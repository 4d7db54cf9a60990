"""A few answers of a model that talks nonsense, held to schemas and tools; scripts/structured asks
the demo model for many."""

import httpx
import pytest

from tests.contract.answers import PATH
from tests.contract.structured import CALLS, SCHEMAS, body, judged
from tests.live.server import PLAIN, SHALLOW, LiveServer

SHORT = 110
"""Tokens, which are enough for all but the form of 40 properties."""
RICHEST = "nested, enums, $refs"
CASES = [RICHEST, *(case for case in SCHEMAS if case not in (RICHEST, "40 properties"))]


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_valid_and_comes_to_its_end(server: LiveServer, case: str) -> None:
    check(server, case, 0)


@pytest.mark.parametrize("number", [0, 2])
def test_calls_are_valid_and_come_to_their_end(server: LiveServer, number: int) -> None:
    check(server, CALLS, number)


def check(server: LiveServer, case: str, number: int) -> None:
    asking = {**body(case, number), "model": SHALLOW, "max_tokens": SHORT}
    with httpx.Client(**PLAIN, base_url=server.url, timeout=300) as http:
        response = http.post(PATH, json=asking)
    reported = judged(case, response.raise_for_status().json())
    assert not reported.fault, reported
