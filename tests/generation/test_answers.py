"""What becomes of an answer, where the catalogue leaves a question open."""

from typing import Any

import pytest

from mlx_server.generation.review import (
    CheckedAnswer,
    CheckFailed,
    RawAnswer,
    Requirements,
    check_answer,
    retry_conversation,
    retry_message,
)
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.requests import ALL_REPAIRS, ChoiceFormat, JsonFormat, NamedTool, RepairPolicy

ANY = JsonFormat()
SAYS = RawAnswer("", "It is 4.")


@pytest.mark.parametrize(
    ("said", "asked", "allowed"),
    [
        (RawAnswer("", "It is 4.", calls=1), Requirements(), ALL_REPAIRS),
        (RawAnswer("", "It is 4.", reason="length"), Requirements(), ALL_REPAIRS),
        (RawAnswer("", "It is 4.", reasoning_ran_out=True), Requirements(), ALL_REPAIRS),
        (RawAnswer("", "It is 4.", is_unterminated=True), Requirements(), ALL_REPAIRS),
        (RawAnswer("", "I <call>f.", call_delimiters=("<call>",)), Requirements(), ALL_REPAIRS),
        (RawAnswer("", "It is 4.", attempted_call=True), Requirements(), ALL_REPAIRS),
        (RawAnswer("", '{"a": 4}', attempted_call=True), Requirements(ANY), ALL_REPAIRS),
        (RawAnswer("Yes.", "It is 4."), Requirements(), ALL_REPAIRS),
        (RawAnswer("", " \n"), Requirements(), ALL_REPAIRS),
        (SAYS, Requirements(), RepairPolicy(mistakes=False)),
        (SAYS, Requirements(choice="required"), ALL_REPAIRS),
        (SAYS, Requirements(choice=NamedTool("f")), ALL_REPAIRS),
        (SAYS, Requirements(ChoiceFormat(("4", "5"))), ALL_REPAIRS),
        (SAYS, Requirements(ANY), ALL_REPAIRS),
    ],
)
def test_reasoning_is_no_answer(
    said: RawAnswer, asked: Requirements, allowed: RepairPolicy
) -> None:
    end = check_answer(said, asked, allowed)
    assert (end.text, end.repairs) == (said.text, ())


def test_json_in_which_a_key_comes_twice_is_asked_for_again() -> None:
    text = '{"a": 1, "a": 2}'
    assert check_answer(RawAnswer(text), Requirements(), ALL_REPAIRS) == CheckedAnswer(text)
    end = check_answer(RawAnswer(text), Requirements(ANY), ALL_REPAIRS)
    assert (end.text, end.repairs, len(end.errors)) == (text, (), 1)


def test_what_could_not_be_checked_is_not_wrong() -> None:
    def never(value: Any, schema: Any) -> list[str]:
        raise CheckFailed

    assert check_answer(RawAnswer("{}"), Requirements(ANY), ALL_REPAIRS, never) == CheckedAnswer(
        "{}"
    )


def test_the_model_is_shown_its_answer_and_what_is_wrong() -> None:
    before = Conversation((Message("user", "Hi"),), (Tool("f"),), {"x": 1})
    again = retry_conversation(before, "{}", ["$.a: missing"])
    assert again.messages == (
        Message("user", "Hi"),
        Message("assistant", "{}"),
        retry_message(["$.a: missing"]),
    )
    assert (again.tools, again.template_kwargs) == (before.tools, before.template_kwargs)
    assert "$.a: missing" in again.messages[-1].content
    assert len(retry_conversation(before, "", ["x"]).messages) == 2, "a turn of nothing is none"
