"""The transcript of a replay model: files good and bad, and which entry answers which request."""

import logging
from pathlib import Path

import pytest

from mlx_server.errors import NoRecording
from mlx_server.messages import Conversation, Message
from mlx_server.requests import Prompt
from tests.sources.recorded_entries import CALL, outputs, read, result, said


def test_entries_are_used_in_order_round_and_round(tmp_path: Path) -> None:
    found = read(tmp_path, [{"output": word} for word in "abc"])
    assert outputs(found, *([said("x")] * 7)) == list("abcabca")


def test_matches_come_first_and_use_up_no_other_entry(tmp_path: Path) -> None:
    entries = [
        {"output": "a"},
        {"match": "Hi", "output": "first match"},
        {"output": "b"},
        {"match": "regex:H", "output": "second match"},
    ]
    found = read(tmp_path, entries)
    prompts = [said(text) for text in ("x", "Hi", "Ho Ho", "Hi", "x", "x")]
    assert outputs(found, *prompts) == ["a", "first match", "second match", "first match", "b", "a"]


@pytest.mark.parametrize(
    ("prompt", "param"), [(said("nothing like it"), "messages"), ("nothing like it", "prompt")]
)
def test_what_no_entry_answers_is_a_mistake_of_the_request(
    tmp_path: Path, prompt: Prompt, param: str
) -> None:
    found = read(tmp_path, [{"match": "Hi", "output": "x"}])
    with pytest.raises(NoRecording, match=r"'nothing like it' .*entry 1 \(`match`\)") as caught:
        found.pick(prompt)
    assert caught.value.param == param
    assert (caught.value.status, caught.value.code) == (400, "no_recording")


def test_a_loop_moves_on_to_the_next_entry_that_matches(tmp_path: Path) -> None:
    entries = [
        {"match": "Sum?", "output": "call"},
        {"match": "Sum?", "output": "call again"},
        {"match": "regex:.", "output": "It is 5."},
        {"output": "the rest"},
    ]
    user = Message("user", "Sum?")
    loop = (user, CALL, result(), CALL, result(), Message("assistant", "5"), user, CALL, result())
    steps = [Conversation(loop[:end]) for end in (1, 3, 5, 7, 9)]
    found = read(tmp_path, entries)
    assert outputs(found, *steps) == ["call", "call again", "It is 5.", "call", "call again"]
    longer = Conversation((user, *[CALL, result()] * 3))
    assert outputs(found, longer) == ["the rest"]


def test_an_entry_that_names_its_place_goes_first(tmp_path: Path) -> None:
    entries = [{"match": "regex:.", "output": "any"}, {"last": "Hi", "output": "this"}]
    assert outputs(read(tmp_path, entries), said("Hi"), said("Ho")) == ["this", "any"]


def test_what_matched_and_what_did_not_is_logged_without_any_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = [
        {"match": "secret one", "output": "a"},
        {"match": "secret two", "turn": 3, "output": "b"},
        {"match": "secret two", "output": "c"},
    ]
    found = read(tmp_path, entries)
    with caplog.at_level(logging.INFO, "mlx_server.replay"):
        recording = found.pick(said("secret two"))
        with pytest.raises(NoRecording):
            found.pick(said("secret three"))
    assert recording.name == "entry 3 of said.yaml (line 6)"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "INFO",
            "entry 3 of said.yaml (line 6) answers turn 1; these do not match: entry 1 (`match`), "
            "entry 2 (`turn`)",
        ),
        (
            "WARNING",
            "no entry of said.yaml answers turn 1; these do not match: entry 1 (`match`), entry 2 "
            "(`match`), entry 3 (`match`)",
        ),
    ]
