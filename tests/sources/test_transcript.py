"""The transcript of a replay model: which entry answers which request, and its tokens."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from mlx_server.errors import NoRecording, TranscriptBroken
from mlx_server.families.json_families import PLAIN
from mlx_server.messages import Conversation, Message
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.requests import Prompt
from mlx_server.sources import transcript
from mlx_server.sources.transcript import (
    RecordedAnswer,
    RecordedCall,
    Transcript,
    TranscriptEntry,
    read_file,
    read_transcript,
)
from tests.families import byte_level
from tests.tables import cases

VOCABULARY = 300


def written(folder: Path, entries: Any, suffix: str = ".yaml") -> Path:
    """Text as it is; entries in the way of the suffix."""
    path = folder / f"said{suffix}"
    if isinstance(entries, str):
        path.write_text(entries, "utf-8")
    elif suffix == ".yaml":
        path.write_text(yaml.safe_dump(entries, allow_unicode=True), "utf-8")
    else:
        lines = (json.dumps(entry, ensure_ascii=False) for entry in entries)
        path.write_text("\n".join(lines), "utf-8")
    return path


def read(folder: Path, entries: Any, suffix: str = ".yaml") -> Transcript:
    return read_transcript(written(folder, entries, suffix), VOCABULARY)


def said(text: str) -> Conversation:
    return Conversation((Message("user", text),))


def outputs(found: Transcript, *prompts: Prompt) -> list[str | None]:
    return [found.pick(prompt).entry.output for prompt in prompts]


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


def refused(folder: Path, entries: Any, suffix: str = ".yaml") -> str:
    with pytest.raises(TranscriptBroken) as caught:
        read(folder, entries, suffix)
    return caught.value.message


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json", ".jsonl", ".ndjson"])
def test_every_field_is_read_from_either_kind_of_file(tmp_path: Path, suffix: str) -> None:
    full = {
        "output": "<|im_start|>Grüezi 🙂\n\u2028two lines<|im_end|>",
        "match": "Hi",
        "finish": "length",
        "delay_ms": 12.5,
        "generation_prompt": "<think>\n",
    }
    entries = [full, {"output_token_ids": [0, 5, VOCABULARY - 1]}]
    whole = json.dumps(entries, ensure_ascii=suffix == ".json")
    found = read(tmp_path, entries if suffix in (".jsonl", ".ndjson") else whole, suffix)
    assert found.pick(said("Hi")).entry == TranscriptEntry(
        output=full["output"],  # type: ignore[arg-type]
        match="Hi",
        finish="length",
        delay_ms=12.5,
        generation_prompt="<think>\n",
    )
    assert found.pick(said("Ho")).entry == TranscriptEntry(output_token_ids=(0, 5, VOCABULARY - 1))


def test_yaml_is_written_by_hand(tmp_path: Path) -> None:
    text = """\
# what the model says
- output: |-
    first
    second
- match: "regex:(?i)weather"
  output: Rain.
"""
    found = read(tmp_path, text)
    assert outputs(found, said("x"), said("The WEATHER?")) == ["first\nsecond", "Rain."]


def test_json_lines_may_have_gaps_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = '\ufeff\n{"output": "a"}\r\n\n  \n{"output": "b\x85\u2028"}\n'
    assert outputs(read(tmp_path, text, ".jsonl"), "1", "2", "3") == ["a", "b\x85\u2028", "a"]


@cases
@pytest.mark.parametrize("suffix", [".yaml", ".jsonl"])
def test_a_malformed_entry_is_reported_with_its_line_number_and_field(
    tmp_path: Path, entry: Any, field: str, suffix: str
) -> None:
    message = refused(tmp_path, [{"output": "fine"}, entry, {}], suffix)
    assert message.startswith(f"The transcript can't be played: said{suffix}:2: entry 2: ")
    assert field in message


def test_every_mistake_is_reported_with_its_line(tmp_path: Path) -> None:
    text = "# comment\n- output: a\n\n- outptu: b\n  match: c\n- output: 5\n"
    assert read_file(written(tmp_path, text)).problems == [
        "said.yaml:4: entry 2: unknown key `outptu`: did you mean `output`?",
        "said.yaml:6: entry 3: `output` should be text: put it in quotes, or after `|-`",
    ]
    text = '[\n  {"output": "a"},\n  {"output": "]["},\n\n  {}\n]\n'
    (problem,) = read_file(written(tmp_path, text, ".json")).problems
    assert problem.startswith("said.json:5: entry 3: it needs one of")
    many = [{"outptu": "a"}] * 30
    assert len(read_file(written(tmp_path, many)).problems) == transcript.SHOWN + 1


@pytest.mark.parametrize("field", ["output", "generation_prompt"])
def test_half_a_character_is_no_text(tmp_path: Path, field: str) -> None:
    line = json.dumps({"output": "a", field: "\ud83d"})
    message = refused(tmp_path, line, ".jsonl")
    assert "entry 1" in message
    assert f"`{field}`" in message


@pytest.mark.slow
@cases
def test_a_file_that_is_no_list_of_entries_is_told(
    tmp_path: Path, text: str, suffix: str, reported: str
) -> None:
    message = refused(tmp_path, text, suffix)
    assert message.startswith(f"The transcript can't be played: said{suffix}:")
    assert reported in message


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".yaml", ".jsonl"])
def test_a_file_of_any_depth_is_told(tmp_path: Path, suffix: str) -> None:
    assert f"said{suffix}:" in refused(tmp_path, "[" * 100_000, suffix)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert transcript.MAX_BYTES == 64 << 20
    path = tmp_path / "said.jsonl"
    with path.open("wb") as file:
        file.truncate(transcript.MAX_BYTES + 1)
    with pytest.raises(TranscriptBroken, match="larger than 64 MiB"):
        read_transcript(path, VOCABULARY)
    entry = json.dumps({"output": "a"})
    monkeypatch.setattr(transcript, "MAX_BYTES", len(entry))
    assert outputs(read(tmp_path, entry, ".jsonl"), "x") == ["a"]
    assert "larger" in refused(tmp_path, entry + " ", ".jsonl")
