"""Files of recordings, good and bad: what is read of them, and how mistakes are reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_server.errors import TranscriptBroken
from mlx_server.sources import transcript
from mlx_server.sources.transcript import TranscriptEntry, read_file, read_transcript
from tests.sources.recorded_entries import VOCABULARY, outputs, read, said, written
from tests.tables import cases


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
