"""Answers that a test gives: each once, in turn, by the name that a request has for the model."""

import pytest

from mlx_server import limits
from mlx_server.errors import NoRecording
from mlx_server.messages import Conversation, Message
from mlx_server.sources.given_answers import GivenAnswers
from mlx_server.sources.transcript import TranscriptEntry

ASKED = Conversation((Message("user", "Hi"), Message("assistant", "Yes?"), Message("user", "Go")))


def entries(*outputs: str) -> list[TranscriptEntry]:
    return [TranscriptEntry(output) for output in outputs]


def test_each_answers_one_request_in_turn() -> None:
    given = GivenAnswers()
    given.add("a", entries("1", "2"))
    given.add("b", entries("3"))
    given.add("a", entries("4"))
    assert given.left == {"a": 3, "b": 1}
    found = [given.pick(ASKED, (name, "qwen3")) for name in ("a", "b", "a", "a")]
    assert [each.entry.output for each in found] == ["1", "3", "2", "4"]
    assert found[-1].name == "answer 3 given for a"
    assert (given.left, given.unanswered) == ({}, [])


def test_a_request_too_many_is_named() -> None:
    given = GivenAnswers()
    given.add("a", entries("1"))
    given.pick(ASKED, ("a",))
    with pytest.raises(NoRecording, match="all 1 answers are used for this model"):
        given.pick(ASKED, ("a",))
    with pytest.raises(NoRecording, match="no answer was given for this model"):
        given.pick("x" * 200, ("b",))
    first, second = given.unanswered
    assert first == "the request for 'a', turn 2, that ends with 'Go'"
    assert second == f"the request for 'b', turn 1, that ends with '{'x' * 77}...'"


def test_a_reset_leaves_nothing() -> None:
    given = GivenAnswers()
    given.add("a", entries("1"))
    with pytest.raises(NoRecording):
        given.pick(ASKED, ("b",))
    given.reset()
    assert (given.left, given.unanswered) == ({}, [])
    with pytest.raises(NoRecording, match="no answer was given"):
        given.pick(ASKED, ("a",))


def test_so_many_requests_are_named_and_no_more() -> None:
    given = GivenAnswers()
    for _ in range(limits.UNANSWERED_REQUESTS + 5):
        with pytest.raises(NoRecording):
            given.pick(ASKED, ("a",))
    assert len(given.unanswered) == limits.UNANSWERED_REQUESTS
