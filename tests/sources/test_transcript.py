"""The transcript of a replay model: which entry answers which request, and its tokens."""

import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from mlx_server.errors import NoRecording
from mlx_server.families.json_families import PLAIN
from mlx_server.messages import Conversation
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.requests import Prompt
from mlx_server.sources.transcript import RecordedAnswer, RecordedCall, TranscriptEntry
from tests.families import byte_level
from tests.sources.recorded_entries import outputs, read, said
from tests.tables import cases

prompts_of = TypeAdapter(tuple[Conversation | tuple[int, ...] | str, ...]).validate_python


@cases
def test_a_request_gets_the_output_of_its_entry(
    tmp_path: Path, entries: list[Any], prompts: list[Any], outputs: list[str]
) -> None:
    transcript = read(tmp_path, entries)
    found = [transcript.pick(prompt).entry.output for prompt in prompts_of(prompts)]
    assert found == outputs


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


def test_tokens_are_those_of_the_output(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    text = "Hi<|im_end|>"
    assert TranscriptEntry(output=text).tokens(tokenizer, PLAIN) == tokenizer.encode(text)
    assert TranscriptEntry(output_token_ids=(3, 1, 2)).tokens(tokenizer, PLAIN) == [3, 1, 2]
    assert TranscriptEntry(output="").tokens(tokenizer, PLAIN) == []
    call = RecordedCall("f", {"a": 1})
    answer = RecordedAnswer(reasoning="Hm.", text="Well.", calls=(call,))
    written = (
        '<think>\nHm.\n</think>\n\nWell.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    )
    assert TranscriptEntry(answer=answer).tokens(tokenizer, PLAIN) == tokenizer.encode(written)


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".jsonl"])
def test_an_escaped_emoji_is_one_character(tmp_path: Path, suffix: str) -> None:
    entry = '{"match": "Hi \\ud83d\\ude42", "output": "\\ud83d\\ude42"}'
    text = entry if suffix == ".jsonl" else f"[{entry}]"
    assert outputs(read(tmp_path, text, suffix), said("Hi 🙂")) == ["🙂"]
