"""The transcript of a replay model: files good and bad, and which entry answers which request."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.errors import NoRecording
from mlx_server.families.plain import PLAIN
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.requests import Prompt
from mlx_server.sources.transcript import Transcript, read_transcript
from mlx_server.sources.transcript_entry import RecordedAnswer, RecordedCall, TranscriptEntry
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


def said(text: str, *earlier: Message) -> Conversation:
    return Conversation((*earlier, Message("user", text)))


def outputs(found: Transcript, *prompts: Prompt) -> list[str | None]:
    return [found.pick(prompt).entry.output for prompt in prompts]


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
