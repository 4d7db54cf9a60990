"""Which requests an entry answers, and the tokens of its output."""

from pathlib import Path
from typing import Any

import pytest

from mlx_server.families.json_families import PLAIN
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.requests import Prompt
from mlx_server.sources.transcript import RecordedAnswer, RecordedCall, TranscriptEntry
from tests.families import byte_level
from tests.sources.recorded_entries import CALL, outputs, read, result, said
from tests.tables import cases


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


def test_a_reminder_after_the_question_hides_no_match(tmp_path: Path) -> None:
    found = read(tmp_path, [{"match": "Hi", "output": "matched"}, {"output": "other"}])
    asked = (Message("user", "Hi"), Message("user", "Mind the date."))
    later = (*asked, Message("assistant", "Ho"))
    prompts = [
        Conversation(asked),
        Conversation((*asked, CALL, result("Ho"))),
        said("What?", *later),
    ]
    assert outputs(found, *prompts) == ["matched", "other", "other"]
    both = read(tmp_path, [{"match": "Hi", "output": "first"}, {"match": "Ho", "output": "last"}])
    assert outputs(both, said("Ho", Message("user", "Hi"))) == ["last"]


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
    ({"last": "regex:^sunny"}, [Conversation((CALL, result("sunny, 20 C")))], [said("not sunny")]),
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
    ({"tools": []}, [said("x"), "x"], [Conversation((Message("user", "x"),), (Tool("f"),))]),
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


@cases
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
