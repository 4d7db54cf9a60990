"""Counts of tokens, wherever they come and whatever they are called."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.upstream.usage import MAX_TOKENS, UpstreamUsage, usage_of, whole_number
from tests.upstream.playing import USAGE, AnswerReader, PlayingServer, delta, in_one, streamed
from tests.upstream.quirks import Quirk, check, reads

QUIRKS = (
    Quirk(
        "the usage in the middle",
        ({"content": "Ye"}, USAGE, {"content": "s"}),
        text="Yes",
    ),
)


@reads(*QUIRKS)
def test_it_reads(
    quirk: Quirk, read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    check(quirk, read_answer, clients, upstream)


def test_usage_that_is_missing_is_estimated_and_reported(
    clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    upstream.plays(streamed(delta(content="Yes, it is."), delta("stop")))
    found = in_one(clients["gpt_oss"], {})
    assert found["repairs"] == ["usage usage"]


@pytest.mark.parametrize(
    "chunk",
    [
        {"usage": {"prompt_tokens": 7, "completion_tokens": 5}},
        {"usage": {"input_tokens": 7, "output_tokens": 5}},
        {"usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 5}},
        {"timings": {"prompt_n": 7, "predicted_n": 5}},
        {"x_groq": {"usage": {"prompt_tokens": 7, "completion_tokens": 5}}},
        {"prompt_eval_count": 7, "eval_count": 5},
    ],
    ids=lambda chunk: ", ".join(chunk),
)
def test_counts_are_found_under_each_servers_names(chunk: dict[str, Any]) -> None:
    assert usage_of(chunk, None) == UpstreamUsage(7, 5)


@pytest.mark.parametrize(
    ("value", "number"),
    [(7, 7), ("7", 7), (7.0, 7), (7.5, None), (True, None), ("seven", None), ("9" * 99, None)],
)
def test_a_whole_number_by_other_types(value: Any, number: int | None) -> None:
    assert whole_number(value) == number


def test_a_count_that_can_not_be_is_none() -> None:
    found = usage_of({"usage": {"prompt_tokens": MAX_TOKENS, "completion_tokens": "5"}}, None)
    assert found == UpstreamUsage(None, 5, is_mistyped=True)
