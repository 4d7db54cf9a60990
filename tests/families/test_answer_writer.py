"""What is written for a family's models is what its parser reads, for all families that can."""

import json
from typing import Any

import pytest

from mlx_server.errors import AnswerUnwritable
from mlx_server.events import Event, Repaired
from mlx_server.families import FAMILIES, family_named
from mlx_server.families.base import ModelFamily
from mlx_server.messages import Message, Tool, ToolCall
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.sources.transcript import write_answer
from tests.families.goldens import folded, tokenizer_of, tools

HOSTILE = "a\n\tb = \"c\" \\ 'd' </x> ü 🗼 <|end"


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall("", name, json.dumps(arguments, ensure_ascii=False))


PARIS = call("get_weather", city="Paris", unit="c")
VALUES = call("search", query="a, b: c", filters={"n": [1, 0.5, {}], "open": True, "none": None})
ANSWERS = {
    "text": Message("assistant", "It rains — 🗼.\n\nSecond."),
    "thought": Message("assistant", "It rains.", reasoning="One.\nTwo."),
    "call": Message("assistant", tool_calls=(PARIS,)),
    "no arguments": Message("assistant", tool_calls=(call("get_time"),)),
    "thought and call": Message("assistant", reasoning="Hm.", tool_calls=(PARIS,)),
    "text and call": Message("assistant", "Let me see.", tool_calls=(PARIS,)),
    "all": Message("assistant", "Let me see.", reasoning="Hm.", tool_calls=(PARIS,)),
    "two calls": Message("assistant", tool_calls=(PARIS, call("get_weather", city="Zürich"))),
    "two tools": Message("assistant", tool_calls=(PARIS, VALUES)),
    "any text": Message("assistant", tool_calls=(call("write_file", path="a", content=HOSTILE),)),
}

WITHOUT_THOUGHTS = {
    "command_r", "functionary", "functionary_v2", "functiongemma", "gemma3", "granite_code",
    "smollm2",
}  # fmt: skip
WITHOUT_CALLS = {"gemma3"}
ONE_CALL_ALONE = {"glm4"}
"""A name, a line break and arguments: an answer that is such a call is nothing else."""


def is_written(family: ModelFamily, answer: Message) -> bool:
    thinks = not answer.reasoning or family.name not in WITHOUT_THOUGHTS
    calls = not answer.tool_calls or family.name not in WITHOUT_CALLS
    alone = len(answer.tool_calls) + bool(answer.content) <= 1 or family.name not in ONE_CALL_ALONE
    return thinks and calls and (alone or not answer.tool_calls)


CASES = [
    (family, name)
    for at, family in enumerate(FAMILIES)
    for name in [*ANSWERS][at % 3 :: 3]  # each answer in a third of the families
    if is_written(family, ANSWERS[name])
]
REFUSED = [(f, name) for f in FAMILIES for name in ANSWERS if not is_written(f, ANSWERS[name])]


def read(family: ModelFamily, output: str, offered: tuple[Tool, ...]) -> list[Event]:
    tokenizer = tokenizer_of(family.name)
    parser = family.make_parser(ParseContext(tools=offered, control=tokenizer.control_tokens))
    text = tokenizer.detokenizer()
    events = [e for id in tokenizer.encode(output) for e in parser.feed(id, text.feed(id))]
    return [*events, *parser.finish(cut=False)]


def test_no_space_follows_a_thought_of_a_family_whose_texts_keep_theirs() -> None:
    """The grammar of a required call takes none there."""
    output = write_answer(
        family_named("gemma4"), tokenizer_of("gemma4"), ANSWERS["thought and call"]
    )
    assert "<channel|><|tool_call>" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"), CASES, ids=[f"{family.name}: {name}" for family, name in CASES]
)
def test_an_answer_is_read_as_it_was_given(family: ModelFamily, name: str) -> None:
    """With the tools of the golden cases, whose schemas say more than the arguments do."""
    answer = ANSWERS[name]
    events = read(family, write_answer(family, tokenizer_of(family.name), answer), tools())
    found = folded(events)
    assert found.reasoning.strip() == (answer.reasoning or "")
    assert found.text.strip() == answer.content
    made = [(made.name, made.arguments) for made in found.calls]
    assert made == [(each.name, json.loads(each.arguments)) for each in answer.tool_calls]
    assert not [event for event in events if isinstance(event, Repaired)]


@pytest.mark.parametrize(
    ("family", "name"), REFUSED, ids=[f"{family.name}: {name}" for family, name in REFUSED]
)
def test_what_a_family_can_not_write_is_refused_by_its_name(family: ModelFamily, name: str) -> None:
    with pytest.raises(AnswerUnwritable, match=f"The family {family.name} has no way to write"):
        write_answer(family, tokenizer_of(family.name), ANSWERS[name])


def test_the_reason_is_named() -> None:
    gemma, called = family_named("gemma3"), ANSWERS["call"]
    with pytest.raises(AnswerUnwritable, match="calls of tools"):
        write_answer(gemma, tokenizer_of("gemma3"), called)
    smollm, thought = family_named("smollm2"), ANSWERS["thought"]
    with pytest.raises(AnswerUnwritable, match="thoughts"):
        write_answer(smollm, tokenizer_of("smollm2"), thought)


def test_text_is_no_control_token() -> None:
    text = Message("assistant", "The token <|im_end|> ends a turn.")
    with pytest.raises(AnswerUnwritable):
        write_answer(family_named("qwen3"), tokenizer_of("qwen3"), text)


def test_an_argument_is_not_cut_at_a_tag_of_the_format() -> None:
    content = "</parameter>\n<parameter=path>\nb\n"
    answer = Message("assistant", tool_calls=(call("write_file", path="a", content=content),))
    with pytest.raises(AnswerUnwritable, match="this answer as a whole"):
        write_answer(family_named("qwen3_coder"), tokenizer_of("qwen3_coder"), answer)


@pytest.mark.slow
def test_arguments_may_be_long() -> None:
    long = Message("assistant", tool_calls=(call("write_file", path="a", content="ab\n" * 4000),))
    output = write_answer(family_named("qwen3_coder"), tokenizer_of("qwen3_coder"), long)
    assert "ab\n" * 4000 in output
