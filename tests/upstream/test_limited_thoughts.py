"""A thinking budget by two requests: the second continues the message with its thoughts closed."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.tables import cases
from tests.upstream.playing import (
    USAGE,
    AnswerReader,
    PlayingServer,
    Reply,
    chat,
    delta,
    events,
    gateway,
    in_chunks,
    in_one,
    says,
    streamed,
    whole,
)

CONTINUES = {"continue_message": True}
BUDGET: Any = {"thinking_budget": 5}
HELD = "<think>\nHm.\n</think>\n\n"
"""The message that the second request continues."""


@pytest.fixture(scope="module")
def client(upstream: PlayingServer) -> Iterator[TestClient]:
    models: dict[str, dict[str, Any]] = {
        "up": {"capabilities": CONTINUES, "family": "qwen3"},
        "harmony": {"capabilities": CONTINUES, "family": "gpt_oss"},
        "own": {"capabilities": {"thinking_budget": True}, "family": "gpt_oss"},
        "other": {"family": "qwen3"},
    }
    with gateway(upstream.url, models) as client:
        yield client


def cut(finish: str = "length", **said: Any) -> Reply:
    return streamed(delta(**said), delta(finish), USAGE)


@pytest.mark.parametrize("ask", [in_one, in_chunks])
@pytest.mark.parametrize(
    "first",
    [
        cut(reasoning="Hm."),
        cut(content="<think>\nHm."),
        cut(finish="stop", reasoning="Hm."),
        cut(finish="stop", content="<think>Hm.\n"),
        whole({"choices": [{"message": {"reasoning": "Hm."}, "finish_reason": "length"}]}),
    ],
    ids=["cut", "cut in the text", "ended", "ended in the text", "not streamed"],
)
def test_thoughts_end_and_the_answer_follows(
    first: Reply, ask: AnswerReader, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(first, says("Paris."))
    found = ask(client, {**BUDGET, "stop": ["!"], "max_tokens": 20})
    assert (found["reasoning"].strip(), found["text"]) == ("Hm.", "Paris.")
    assert (found["finish"], found["unmet"]) == ("stop", [])
    one, two = upstream.bodies
    assert (one["max_tokens"], one["stop"]) == (5, ["!", "</think>"])
    assert (two["stop"], two["continue_final_message"]) == (["!"], True)
    assert two["add_generation_prompt"] is False
    begun = two["messages"][-1]
    assert (begun["role"], begun["content"].replace(">Hm", ">\nHm")) == ("assistant", HELD)


def test_an_answer_within_the_budget_is_one_request(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(streamed(delta(reasoning="Hm."), delta("stop", content="Paris."), USAGE))
    assert in_one(client, BUDGET)["text"] == "Paris."
    assert len(upstream.asked) == 1


def test_an_answer_that_the_budget_cuts_goes_on(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(
        streamed(delta(reasoning="Hm."), delta("length", content="Pa"), USAGE), says("ris.")
    )
    assert in_chunks(client, BUDGET)["text"] == "Paris."
    assert upstream.bodies[1]["messages"][-1]["content"] == HELD + "Pa"


def test_no_thoughts_at_all(client: TestClient, upstream: PlayingServer) -> None:
    upstream.plays(says("Paris."))
    found = in_one(client, {"thinking_budget": 0})
    assert (found["reasoning"], found["text"]) == ("", "Paris.")
    (body,) = upstream.bodies
    assert body["messages"][-1]["content"] == "<think>\n\n</think>\n\n"
    upstream.plays(streamed(delta("length", content="Pa"), USAGE))
    assert in_one(client, {"thinking_budget": 0})["finish"] == "length"
    assert len(upstream.bodies) == 1


def test_a_server_that_takes_the_answer_for_thoughts(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(cut(reasoning="Hm."), cut(finish="stop", reasoning="Paris."))
    found = in_one(client, BUDGET)
    assert (found["reasoning"], found["text"]) == ("Hm.", "Paris.")
    assert found["repairs"] == ["reasoning content"]


def test_a_second_request_that_fails_ends_the_answer(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(cut(reasoning="Hm."), whole({}, 500))
    *_, last = events(chat(client, stream=True, **BUDGET).text)
    assert last["error"]["code"] == "upstream_failed"
    upstream.plays(cut(reasoning="Hm."), Reply((b"data: {",), breaks=True))
    assert chat(client, **BUDGET).status_code == 502


@cases
def test_where_it_can_not_be(
    said: Any, why: str, client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("Paris."))
    response = chat(client, **said, **BUDGET)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "thinking_budget"
    assert why in response.json()["error"]["message"]
    assert not upstream.asked


def test_an_upstream_that_limits_thoughts_itself(
    client: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("Paris."))
    assert in_one(client, {"model": "own", **BUDGET})["text"] == "Paris."
    (body,) = upstream.bodies
    assert body["thinking_budget"] == 5
