"""Log probabilities of an upstream stay with the text of their tokens, whatever is taken out."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.upstream.failing import WRONG
from tests.upstream.playing import (
    USAGE,
    PlayingServer,
    Reply,
    answered,
    delta,
    gateway,
    streamed,
    whole,
)

ASKED: Any = {"logprobs": True, "top_logprobs": 1}


@pytest.fixture(scope="module")
def client(upstream: PlayingServer) -> Iterator[TestClient]:
    with gateway(upstream.url, {"up": {"family": "qwen3"}}) as client:
        yield client


def scored(text: str, *tokens: str, **more: Any) -> Any:
    """A chunk with the log probability -0.5 for each token, and two alternatives."""
    top = [{"token": "?", "logprob": -3.0, "bytes": [63]}, {"token": "!", "logprob": -2.0}]
    content = [{"token": each, "logprob": -0.5, "top_logprobs": top} for each in tokens or [text]]
    found = delta(content=text, **more)
    found["choices"][0]["logprobs"] = {"content": content}
    return found


def tokens_of(found: Any) -> list[str]:
    return [each["token"] for each in found["choices"][0]["logprobs"]["content"]]


def test_they_have_openais_form(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(streamed(scored("It "), scored("rains.", "rain", "s."), delta("stop"), USAGE))
    found = answered(client, **ASKED)
    assert tokens_of(found) == ["It ", "rain", "s."]
    assert found["choices"][0]["logprobs"]["content"][0] == {
        "token": "It ",
        "logprob": -0.5,
        "bytes": list(b"It "),
        "top_logprobs": [{"token": "!", "logprob": -2.0, "bytes": [33]}],
    }


def test_a_token_may_belong_to_two_texts(client: TestClient, upstream: PlayingServer) -> None:
    """What may begin a delimiter is held back."""
    upstream.plays(streamed(scored("1 <"), scored(" 2"), delta("stop"), USAGE))
    assert tokens_of(answered(client, **ASKED)) == ["1 <", " 2"]


def test_those_of_thoughts_in_the_text_are_left_out(
    client: TestClient, upstream: PlayingServer
) -> None:
    pieces = [scored(each) for each in ("<think>", "Rain", "?", "</think>", "\n\n", "Rain", "!")]
    upstream.plays(streamed(*pieces, delta("stop"), USAGE))
    found = answered(client, **ASKED)
    assert found["choices"][0]["message"]["content"] == "Rain!"
    assert tokens_of(found) == ["Rain", "!"]


def test_those_after_a_stop_string_are_left_out(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(streamed(*map(scored, ("One", ", ", "two")), delta("stop"), USAGE))
    assert tokens_of(answered(client, stop=[", t"], **ASKED)) == ["One"]


def test_those_of_a_body_that_is_not_streamed(client: TestClient, upstream: PlayingServer) -> None:
    body = {"message": {"content": "Yes."}, "logprobs": scored("Yes.")["choices"][0]["logprobs"]}
    upstream.plays(whole({"choices": [{**body, "finish_reason": "stop"}]}))
    assert tokens_of(answered(client, **ASKED)) == ["Yes."]


def test_an_upstream_that_sends_none(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(streamed(delta(content="Yes"), delta("stop"), USAGE))
    found = answered(client, **ASKED)
    assert [each["what"] for each in found["mlx_server"]["unmet"]] == [
        "logprobs: the upstream sent none"
    ]


@pytest.mark.parametrize("wrong", [*WRONG, -1, [300]], ids=ascii)
def test_wrong_types(wrong: Any, client: TestClient, upstream: PlayingServer) -> None:
    entry = {"token": wrong, "logprob": wrong, "bytes": wrong, "top_logprobs": wrong}
    spelled = {"token": "Yes", "logprob": -1.0, "bytes": wrong, "top_logprobs": [wrong]}
    lists = {"tokens": wrong, "token_logprobs": wrong, "top_logprobs": wrong}
    for said in (wrong, {"content": wrong}, {"content": [wrong, entry, spelled]}, lists):
        piece = delta("stop", content="Yes")
        piece["choices"][0]["logprobs"] = said
        reply: Reply = streamed(piece, USAGE)
        upstream.plays(reply)
        assert answered(client, **ASKED)["choices"][0]["message"]["content"] == "Yes"
