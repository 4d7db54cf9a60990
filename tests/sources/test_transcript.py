"""What a replay model is to say: files good and bad, and which entry answers whom."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.errors import BadRequest, ModelUnusable
from mlx_server.messages import Conversation, Message
from mlx_server.requests import Prompt
from mlx_server.sources import transcript
from mlx_server.sources.transcript import Transcript, TranscriptEntry, read_transcript
from tests.families import byte_level

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


def refused(folder: Path, entries: Any, suffix: str = ".yaml") -> str:
    with pytest.raises(ModelUnusable) as caught:
        read(folder, entries, suffix)
    return caught.value.message


def said(text: str, *earlier: Message) -> Conversation:
    return Conversation((*earlier, Message("user", text)))


def outputs(found: Transcript, *prompts: Prompt) -> list[str | None]:
    return [found.pick(prompt).output for prompt in prompts]


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
    assert found.pick(said("Hi")) == TranscriptEntry(
        output=full["output"],  # type: ignore[arg-type]
        match="Hi",
        finish="length",
        delay_ms=12.5,
        generation_prompt="<think>\n",
    )
    assert found.pick(said("Ho")) == TranscriptEntry(output_token_ids=(0, 5, VOCABULARY - 1))


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


def test_entries_are_used_in_order_round_and_round(tmp_path: Path) -> None:
    found = read(tmp_path, [{"output": word} for word in "abc"])
    assert outputs(found, *([said("x")] * 7)) == list("abcabca")


def test_a_match_is_the_whole_last_user_text(tmp_path: Path) -> None:
    found = read(tmp_path, [{"match": "Hi", "output": "matched"}, {"output": "other"}])
    before = (Message("user", "Hi"), Message("assistant", "Hi"))
    assert outputs(
        found,
        said("Hi"),
        said("Hi!"),
        said("hi"),
        said("Ho", *before),
        said("Hi", *before),
        Conversation((Message("user", "Hi"), Message("tool", "Ho"))),
        Conversation((Message("system", "Hi"),)),
        "Hi",
        (1, 2),
    ) == ["matched", "other", "other", "other", "matched", "matched", "other", "matched", "other"]


def test_a_regular_expression_is_searched_for(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        [
            {"match": "regex:^add (\\d+)", "output": "sum"},
            {"match": "regex:\\d+$", "output": "number"},
            {"match": "regex", "output": "exact"},
        ],
    )
    prompts = [said("add 5"), said("please add 5"), said("regex")]
    assert outputs(found, *prompts) == ["sum", "number", "exact"]


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
    with pytest.raises(BadRequest, match="nothing like it") as caught:
        found.pick(prompt)
    assert caught.value.param == param


def test_tokens_are_those_of_the_output(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    text = "Hi<|im_end|>"
    assert TranscriptEntry(output=text).tokens(tokenizer) == tokenizer.encode(text)
    assert TranscriptEntry(output_token_ids=(3, 1, 2)).tokens(tokenizer) == [3, 1, 2]
    assert TranscriptEntry(output="").tokens(tokenizer) == []


MALFORMED: list[tuple[Any, str]] = [
    ({}, "`output`"),
    ({"output": "a", "output_token_ids": [1]}, "`output`"),
    ({"output": None}, "`output`"),
    ({"output": 5}, "output"),
    ({"output": ["a"]}, "output"),
    ({"output_token_ids": 5}, "output_token_ids"),
    ({"output_token_ids": ["a"]}, "output_token_ids"),
    ({"output_token_ids": [1.5]}, "output_token_ids"),
    ({"output_token_ids": [-1]}, "output_token_ids"),
    ({"output_token_ids": [VOCABULARY]}, "output_token_ids"),
    ({"output": "a", "finish": "tool_calls"}, "finish"),
    ({"output": "a", "finish": None}, "finish"),
    ({"output": "", "finish": "length"}, "`finish: length`"),
    ({"output_token_ids": [], "finish": "length"}, "`finish: length`"),
    ({"output": "a", "delay_ms": "long"}, "delay_ms"),
    ({"output": "a", "delay_ms": -1}, "`delay_ms`"),
    ({"output": "a", "delay_ms": 60_001}, "`delay_ms`"),
    ({"output": "a", "delay_ms": float("nan")}, "`delay_ms`"),
    ({"output": "a", "match": 5}, "match"),
    ({"output": "a", "match": "regex:("}, "`match`"),
    ({"output": "a", "generation_prompt": 5}, "generation_prompt"),
    ({"output": "a", "outptu": "b"}, "outptu"),
    ("output", "object"),
    (None, "object"),
    (["output", "a"], "object"),
]


@pytest.mark.parametrize(("entry", "field"), MALFORMED)
@pytest.mark.parametrize("suffix", [".yaml", ".jsonl"])
def test_a_malformed_entry_is_told_by_its_number_and_field(
    tmp_path: Path, entry: Any, field: str, suffix: str
) -> None:
    message = refused(tmp_path, [{"output": "fine"}, entry, {}], suffix)
    assert message.startswith(f"The transcript said{suffix} is not well-formed: entry 2: ")
    assert field in message


@pytest.mark.parametrize("field", ["output", "generation_prompt"])
def test_half_a_character_is_no_text(tmp_path: Path, field: str) -> None:
    line = json.dumps({"output": "a", field: "\ud83d"})
    message = refused(tmp_path, line, ".jsonl")
    assert "entry 1" in message
    assert f"`{field}`" in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no entries"),
        ("# nothing yet\n", "no entries"),
        ("[]", "no entries"),
        ("output: a", "a list"),
        ("just text", "a list"),
        ("- output: 'a\n- ", "line 2"),
        ("- !!python/object/apply:os.system ['true']", "constructor"),
        ("[" * 100_000, ""),
    ],
)
def test_a_file_that_is_no_list_of_entries_is_told(tmp_path: Path, text: str, told: str) -> None:
    message = refused(tmp_path, text)
    assert message.startswith("The transcript said.yaml is not well-formed: ")
    assert told in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no entries"),
        ("\n\n", "no entries"),
        ('{"output": "a"}\n{"output": ', "entry 2"),
        ('{"output": "a"}\n\nnot json', "entry 2"),
        ("[" * 100_000, ""),
    ],
)
def test_lines_that_are_no_json_are_told(tmp_path: Path, text: str, told: str) -> None:
    message = refused(tmp_path, text, ".jsonl")
    assert message.startswith("The transcript said.jsonl is not well-formed: ")
    assert told in message


def test_a_file_that_is_not_there_or_not_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="No such file"):
        read_transcript(tmp_path / "none.yaml", VOCABULARY)
    with pytest.raises(ModelUnusable, match="can't be read"):
        read_transcript(tmp_path, VOCABULARY)
    (tmp_path / "said.yaml").write_bytes(b"- output: \xff")
    with pytest.raises(ModelUnusable, match="can't be read"):
        read_transcript(tmp_path / "said.yaml", VOCABULARY)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert transcript.MAX_BYTES == 64 << 20
    path = tmp_path / "said.jsonl"
    with path.open("wb") as file:
        file.truncate(transcript.MAX_BYTES + 1)
    with pytest.raises(ModelUnusable, match="larger than 64 MiB"):
        read_transcript(path, VOCABULARY)
    entry = json.dumps({"output": "a"})
    monkeypatch.setattr(transcript, "MAX_BYTES", len(entry))
    assert outputs(read(tmp_path, entry, ".jsonl"), "x") == ["a"]
    assert "larger" in refused(tmp_path, entry + " ", ".jsonl")
