"""Counts of tokens that an upstream sends, and what is done without them."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.upstream.pieces import MAX_TOKENS, UpstreamUsage, usage_of
from tests.upstream.playing import PlayingServer, delta, in_one, streamed


def test_usage_that_is_missing_is_estimated_and_reported(
    clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    upstream.plays(streamed(delta(content="Yes, it is."), delta("stop")))
    found = in_one(clients["gpt_oss"], {})
    assert found["repairs"] == ["usage usage"]


def test_counts_with_their_details() -> None:
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 9},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    assert usage_of({"usage": usage}) == UpstreamUsage(7, 5, cached=7, reasoning=2)


@pytest.mark.parametrize("wrong", [MAX_TOKENS, "7", 7.0, -1, True, None])
def test_a_count_that_can_not_be_is_none(wrong: Any) -> None:
    found = usage_of({"usage": {"prompt_tokens": wrong, "completion_tokens": 5}})
    assert found == UpstreamUsage(None, 5)
