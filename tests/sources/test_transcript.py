"""The transcript of a replay model: files good and bad, and which entry answers which request."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.errors import NoRecording, TranscriptBroken
from mlx_server.families.plain import PLAIN
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.requests import Prompt
from mlx_server.sources import transcript_file
from mlx_server.sources.transcript import Transcript, read_transcript
from mlx_server.sources.transcript_entry import RecordedAnswer, RecordedCall, TranscriptEntry
from mlx_server.sources.transcript_file import read_file
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
    with pytest.raises(TranscriptBroken) as caught:
        read(folder, entries, suffix)
    return caught.value.message


def said(text: str, *earlier: Message) -> Conversation:
    return Conversation((*earlier, Message("user", text)))


def outputs(found: Transcript, *prompts: Prompt) -> list[str | None]:
    return [found.pick(prompt).entry.output for prompt in prompts]


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
    with pytest.raises(NoRecording, match=r"'nothing like it' .*entry 1 \(`match`\)") as caught:
        found.pick(prompt)
    assert caught.value.param == param
    assert (caught.value.status, caught.value.code) == (400, "no_recording")


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


CALL = Message("assistant", tool_calls=(ToolCall("c", "f", "{}"),))


def result(text: str = "5") -> Message:
    return Message("tool", text, tool_call_id="c")


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


def test_a_loop_without_an_entry_for_its_next_step_ends(tmp_path: Path) -> None:
    found = read(tmp_path, [{"match": "Sum?", "output": "call"}])
    with pytest.raises(NoRecording, match="entry 1 has answered earlier in this loop"):
        found.pick(Conversation((Message("user", "Sum?"), CALL, result())))


def test_an_answer_to_be_continued_is_no_earlier_step(tmp_path: Path) -> None:
    found = read(tmp_path, [{"match": "Hi", "turn": 1, "output": "a"}])
    prefill = Conversation((Message("user", "Hi"), Message("assistant", "Hel")))
    assert outputs(found, prefill) == ["a"]


CONDITIONS: list[tuple[dict[str, Any], list[Prompt], list[Prompt]]] = [
    (
        {"last": "5"},
        [
            Conversation((Message("user", "x"), CALL, result("5"))),
            Conversation((Message("user", "x"), CALL, result("5"), result("6"))),
            said("5"),
            "5",
        ],
        [
            Conversation((Message("user", "x"), CALL, result("55"))),
            Conversation((Message("tool", "5"), Message("user", "x"), CALL, result("6"))),
            Conversation((Message("tool", "5"), Message("user", "6"))),
        ],
    ),
    (
        {"last": "regex:^sunny"},
        [Conversation((CALL, result("sunny, 20 C")))],
        [said("not sunny")],
    ),
    (
        {"turn": 2},
        [
            said("x", Message("user", "a"), Message("assistant", "b")),
            Conversation((Message("user", "x"), CALL, result())),
        ],
        [said("x"), "x", (1, 2), said("x", CALL, result(), CALL, result())],
    ),
    (
        {"system": "regex:judge"},
        [said("x", Message("developer", "You are a judge."))],
        [said("judge")],
    ),
    (
        {"system": "a\nb"},
        [said("x", Message("system", "a"), Message("developer", "b"))],
        [said("x", Message("system", "a"))],
    ),
    (
        {"tools": ["f"]},
        [Conversation((Message("user", "x"),), (Tool("f"), Tool("g")))],
        [said("x"), Conversation((Message("user", "x"),), (Tool("g"),)), "x"],
    ),
    (
        {"tools": []},
        [said("x"), "x"],
        [Conversation((Message("user", "x"),), (Tool("f"),))],
    ),
    (
        {"match": "x", "turn": 1, "tools": []},
        [said("x")],
        [said("y"), said("x", CALL), Conversation((Message("user", "x"),), (Tool("f"),))],
    ),
]


@pytest.mark.parametrize(("condition", "met", "unmet"), CONDITIONS)
def test_every_condition_must_be_met(
    tmp_path: Path, condition: dict[str, Any], met: list[Prompt], unmet: list[Prompt]
) -> None:
    found = read(tmp_path, [{**condition, "output": "yes"}, {"output": "no"}])
    assert outputs(found, *met) == ["yes"] * len(met)
    assert outputs(found, *unmet) == ["no"] * len(unmet)


def test_a_model_is_known_by_its_id_and_by_the_name_in_the_request(tmp_path: Path) -> None:
    found = read(tmp_path, [{"model": "gpt-4o", "output": "yes"}, {"output": "no"}])
    names = [("gpt-4o", "fake"), ("fake", "gpt-4o"), ("fake", "fake"), ()]
    picked = [found.pick(said("x"), name).entry.output for name in names]
    assert picked == ["yes", "yes", "no", "no"]


def test_an_entry_that_names_its_place_goes_first(tmp_path: Path) -> None:
    entries = [{"match": "regex:.", "output": "any"}, {"last": "Hi", "output": "this"}]
    assert outputs(read(tmp_path, entries), said("Hi"), said("Ho")) == ["this", "any"]


@pytest.mark.parametrize(
    ("recorded", "asked"),
    [
        ("Hi", "Hi \n\n"),
        ("Hi\n", "Hi"),
        ("Hi 🙂", "Hi \\ud83d\\ude42"),
        ("Hi \\ud83d\\ude42", "Hi 🙂\n"),
        ('{"mood": "🙂é"}', json.dumps({"mood": "🙂é"})),
        ("regex:🙂$", "Hi \\uD83D\\uDE42 "),
    ],
)
def test_white_space_at_the_end_and_escaped_characters_are_no_obstacle(
    tmp_path: Path, recorded: str, asked: str
) -> None:
    found = read(tmp_path, [{"match": recorded, "output": "yes"}, {"output": "no"}])
    assert outputs(found, said(asked), said(f"{asked}!")) == ["yes", "no"]


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".jsonl"])
def test_an_escaped_emoji_is_one_character(tmp_path: Path, suffix: str) -> None:
    entry = '{"match": "Hi \\ud83d\\ude42", "output": "\\ud83d\\ude42"}'
    text = entry if suffix == ".jsonl" else f"[{entry}]"
    assert outputs(read(tmp_path, text, suffix), said("Hi 🙂")) == ["🙂"]


def test_entries_in_turn_begin_again_after_a_reset(tmp_path: Path) -> None:
    found = read(tmp_path, [{"output": word} for word in "abc"])
    assert outputs(found, "1", "2") == ["a", "b"]
    found.reset()
    assert outputs(found, "1", "2", "3", "4") == ["a", "b", "c", "a"]


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


MALFORMED: list[tuple[Any, str]] = [
    ({}, "`output`"),
    ({"output": "a", "output_token_ids": [1]}, "`output`"),
    ({"output": "a", "answer": {"text": "a"}}, "`output`"),
    ({"answer": "a"}, "`answer`"),
    ({"answer": {"txt": "a"}}, "`answer`"),
    ({"answer": {"calls": [{"arguments": {}}]}}, "`answer.calls"),
    ({"answer": {"calls": [{"name": "f", "arguments": {"a": float("inf")}}]}}, "not finite"),
    ({"answer": {"text": "a"}, "finish": "length"}, "`finish: length`"),
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
    ({"output": "a", "outptu": "b"}, "unknown key `outptu`: did you mean `output`?"),
    ({"output": {"city": "Paris"}}, "`output` should be text: put it in quotes"),
    ({"output": "a", "last": 5}, "`last` should be text: put it in quotes"),
    ({"output": "a", "last": "regex:["}, "`last` is not a regular expression"),
    ({"output": "a", "turn": 0}, "`turn` should be 1 or more"),
    ({"output": "a", "turn": "2"}, "`turn`"),
    ({"output": "a", "tools": "f"}, "`tools`"),
    ({"output": "a", "off_grammar": "ignore"}, "`off_grammar`"),
    ("output", "object"),
    (None, "object"),
    (["output", "a"], "object"),
]


@pytest.mark.parametrize(("entry", "field"), MALFORMED)
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
    assert len(read_file(written(tmp_path, many)).problems) == transcript_file.SHOWN + 1


@pytest.mark.parametrize("field", ["output", "generation_prompt"])
def test_half_a_character_is_no_text(tmp_path: Path, field: str) -> None:
    line = json.dumps({"output": "a", field: "\ud83d"})
    message = refused(tmp_path, line, ".jsonl")
    assert "entry 1" in message
    assert f"`{field}`" in message


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "no entries"),
        ("# nothing yet\n", "no entries"),
        ("[]", "no entries"),
        ("output: a", "a list"),
        ("just text", "a list"),
        ("- output: a\n- output: b: c\n", "said.yaml:2: this is not YAML"),
        ("- output: a\n- output: \a\n", "said.yaml:2: "),
        ("- output: 'a\n- ", "this is not YAML"),
        ("- !!python/object/apply:os.system ['true']", "constructor"),
        ("[" * 100_000, ""),
    ],
)
def test_a_file_that_is_no_list_of_entries_is_told(
    tmp_path: Path, text: str, reported: str
) -> None:
    message = refused(tmp_path, text)
    assert message.startswith("The transcript can't be played: said.yaml:")
    assert reported in message


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "no entries"),
        ("\n\n", "no entries"),
        ('{"output": "a"}\n{"output": ', "said.jsonl:2: this is not JSON"),
        ('{"output": "a"}\n\nnot json', "said.jsonl:3: this is not JSON"),
        ("[" * 100_000, ""),
    ],
)
def test_lines_that_are_no_json_are_told(tmp_path: Path, text: str, reported: str) -> None:
    message = refused(tmp_path, text, ".jsonl")
    assert message.startswith("The transcript can't be played: said.jsonl:")
    assert reported in message


def test_a_file_that_is_not_there_or_not_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(TranscriptBroken, match="no such file: correct `source:`"):
        read_transcript(tmp_path / "none.yaml", VOCABULARY)
    with pytest.raises(TranscriptBroken, match="can't be read"):
        read_transcript(tmp_path, VOCABULARY)
    (tmp_path / "said.yaml").write_bytes(b"- output: a\n- output: \xff")
    with pytest.raises(TranscriptBroken, match=r"said\.yaml:2: this is not UTF-8"):
        read_transcript(tmp_path / "said.yaml", VOCABULARY)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert transcript_file.MAX_BYTES == 64 << 20
    path = tmp_path / "said.jsonl"
    with path.open("wb") as file:
        file.truncate(transcript_file.MAX_BYTES + 1)
    with pytest.raises(TranscriptBroken, match="larger than 64 MiB"):
        read_transcript(path, VOCABULARY)
    entry = json.dumps({"output": "a"})
    monkeypatch.setattr(transcript_file, "MAX_BYTES", len(entry))
    assert outputs(read(tmp_path, entry, ".jsonl"), "x") == ["a"]
    assert "larger" in refused(tmp_path, entry + " ", ".jsonl")
