"""What becomes of an answer, where the catalogue leaves a question open."""

from typing import Any

import pytest

from mlx_server.config.settings import RepairSettings
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.repair.allowed import EVERYTHING, Repair
from mlx_server.repair.answers import Asked, Outcome, Said, asked_again, outcome, retry_message
from mlx_server.repair.conforming import Unchecked
from mlx_server.requests import Choice, JsonFormat, Named

ANY = JsonFormat()
SAYS = Said("", "It is 4.")


@pytest.mark.parametrize(
    ("said", "asked", "allowed"),
    [
        (Said("", "It is 4.", calls=1), Asked(), EVERYTHING),
        (Said("", "It is 4.", reason="length"), Asked(), EVERYTHING),
        (Said("", "It is 4.", ran_out=True), Asked(), EVERYTHING),
        (Said("", "I <call>f.", call_marks=("<call>",)), Asked(), EVERYTHING),
        (Said("Yes.", "It is 4."), Asked(), EVERYTHING),
        (Said("", " \n"), Asked(), EVERYTHING),
        (SAYS, Asked(), Repair(promote_reasoning=False)),
        (SAYS, Asked(choice="required"), EVERYTHING),
        (SAYS, Asked(choice=Named("f")), EVERYTHING),
        (SAYS, Asked(Choice(("4", "5"))), EVERYTHING),
        (SAYS, Asked(ANY), EVERYTHING),
    ],
)
def test_reasoning_is_no_answer(said: Said, asked: Asked, allowed: Repair) -> None:
    end = outcome(said, asked, allowed)
    assert (end.text, end.repairs) == (said.text, ())


def test_the_settings_are_those_of_models_yaml() -> None:
    names = [field.alias or name for name, field in RepairSettings.model_fields.items()]
    assert names == list(Repair.__dataclass_fields__)
    assert Repair(**RepairSettings().model_dump(by_alias=True)) == EVERYTHING


def test_reasoning_that_is_all_there_is_becomes_the_text() -> None:
    for asked in (Asked(), Asked(choice="none")):
        assert outcome(SAYS, asked, EVERYTHING) == Outcome("It is 4.", (("reasoning", "content"),))


def test_a_call_is_free_of_the_format() -> None:
    assert outcome(Said("I look.", calls=1), Asked(ANY), EVERYTHING) == Outcome("I look.")


def test_text_without_a_format_stays_as_it_is() -> None:
    text = '```json\n{"a": 1,}\n```'
    assert outcome(Said(text), Asked(), EVERYTHING) == Outcome(text)


def test_json_in_which_a_key_comes_twice_is_asked_for_again() -> None:
    text = '{"a": 1, "a": 2}'
    assert outcome(Said(text), Asked(), EVERYTHING) == Outcome(text)
    end = outcome(Said(text), Asked(ANY), EVERYTHING)
    assert (end.text, end.repairs, len(end.errors)) == (text, (), 1)


def test_what_could_not_be_checked_is_not_wrong() -> None:
    def never(value: Any, schema: Any) -> list[str]:
        raise Unchecked

    assert outcome(Said("{}"), Asked(ANY), EVERYTHING, never) == Outcome("{}")


def test_the_schema_decides_in_the_end() -> None:
    asked = Asked(JsonFormat({"type": "array"}))
    assert outcome(Said("[]"), asked, EVERYTHING) == Outcome("[]")
    end = outcome(Said("Here: {}"), asked, EVERYTHING)
    assert end.text == "{}"
    assert end.errors == ("$: {} is not of type 'array'",)


def test_the_model_is_shown_its_answer_and_what_is_wrong() -> None:
    before = Conversation((Message("user", "Hi"),), (Tool("f"),), {"x": 1})
    again = asked_again(before, "{}", ["$.a: missing"])
    assert again.messages == (
        Message("user", "Hi"),
        Message("assistant", "{}"),
        retry_message(["$.a: missing"]),
    )
    assert (again.tools, again.template_kwargs) == (before.tools, before.template_kwargs)
    assert "$.a: missing" in again.messages[-1].content
    assert len(asked_again(before, "", ["x"]).messages) == 2, "a turn of nothing is none"
