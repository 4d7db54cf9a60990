"""What becomes of an answer, where the catalogue leaves a question open."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from mlx_server.families import family_named
from mlx_server.generation.review import (
    CheckedAnswer,
    CheckFailed,
    RawAnswer,
    check_answer,
    retry_conversation,
    retry_message,
    schema_errors,
)
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.requests import (
    ALL_REPAIRS,
    ChoiceFormat,
    Format,
    GenerateRequest,
    JsonFormat,
    NamedTool,
    RepairPolicy,
    ToolChoice,
)
from tests.families.goldens import Golden, Player, Reads, Yaml, folded, shown, tools

ANY = JsonFormat()
SAYS = RawAnswer("", "It is 4.")


def asking(format: Format | None = None, tool_choice: ToolChoice = "auto") -> GenerateRequest:
    return GenerateRequest("m", (), format=format, tool_choice=tool_choice)


@pytest.mark.parametrize(
    ("said", "asked", "allowed"),
    [
        (RawAnswer("", "It is 4.", calls=1), asking(), ALL_REPAIRS),
        (RawAnswer("", "It is 4.", reason="length"), asking(), ALL_REPAIRS),
        (RawAnswer("", "It is 4.", reasoning_ran_out=True), asking(), ALL_REPAIRS),
        (RawAnswer("", "It is 4.", is_unterminated=True), asking(), ALL_REPAIRS),
        (RawAnswer("", "I <call>f.", call_delimiters=("<call>",)), asking(), ALL_REPAIRS),
        (RawAnswer("", "It is 4.", attempted_call=True), asking(), ALL_REPAIRS),
        (RawAnswer("", '{"a": 4}', attempted_call=True), asking(ANY), ALL_REPAIRS),
        (RawAnswer("Yes.", "It is 4."), asking(), ALL_REPAIRS),
        (RawAnswer("", " \n"), asking(), ALL_REPAIRS),
        (SAYS, asking(), RepairPolicy(mistakes=False)),
        (SAYS, asking(tool_choice="required"), ALL_REPAIRS),
        (SAYS, asking(tool_choice=NamedTool("f")), ALL_REPAIRS),
        (SAYS, asking(ChoiceFormat(("4", "5"))), ALL_REPAIRS),
        (SAYS, asking(ANY), ALL_REPAIRS),
    ],
)
def test_reasoning_is_no_answer(
    said: RawAnswer, asked: GenerateRequest, allowed: RepairPolicy
) -> None:
    end = check_answer(said, asked, allowed)
    assert (end.text, end.repairs) == (said.text, ())


def test_json_in_which_a_key_comes_twice_is_asked_for_again() -> None:
    text = '{"a": 1, "a": 2}'
    assert check_answer(RawAnswer(text), asking(), ALL_REPAIRS) == CheckedAnswer(text)
    end = check_answer(RawAnswer(text), asking(ANY), ALL_REPAIRS)
    assert (end.text, end.repairs, len(end.errors)) == (text, (), 1)


def test_what_could_not_be_checked_is_not_wrong() -> None:
    def never(value: Any, schema: Any) -> list[str]:
        raise CheckFailed

    assert check_answer(RawAnswer("{}"), asking(ANY), ALL_REPAIRS, never) == CheckedAnswer("{}")


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


# Each line of catalogue.yaml, through its family's parser however it is cut, and to its end.


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    family: str
    output: str
    reads: Reads
    cut: bool = False
    schema: dict[str, Any] | None = None
    must_call: bool = False
    repair: dict[str, Any] = {}
    asked_again: list[str] = []
    """How each of the errors begins."""

    def played(self) -> Player:
        golden = Golden(self.name, self.output, self.reads, cut=self.cut)
        return Player(family_named(self.family), golden, RepairPolicy(**self.repair))


CASES = msgspec.convert(
    yaml.load(Path(__file__).with_name("catalogue.yaml").read_text("utf-8"), Yaml), list[Case]
)

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def ended(case: Case, reads: Reads) -> CheckedAnswer:
    said = RawAnswer(
        reads.text,
        reads.reasoning,
        len(reads.calls),
        "length" if case.cut else "stop",
        call_delimiters=family_named(case.family).call_delimiters(tools()),
    )
    asked = asking(
        JsonFormat(case.schema) if case.schema else None, "required" if case.must_call else "auto"
    )
    return check_answer(said, asked, RepairPolicy(**case.repair), schema_errors)


@pytest.mark.slow
@every_case
def test_what_comes_of_it(case: Case) -> None:
    for way, events in case.played().ways():
        reads = folded(events)
        end = ended(case, reads)
        mended = [*reads.repairs, *(f"{what} {where}" for what, where in end.repairs)]
        reads = msgspec.structs.replace(reads, text=end.text, repairs=mended)
        assert shown(reads, case.reads) == shown(case.reads, case.reads), way


@every_case
def test_whether_the_model_is_asked_again(case: Case) -> None:
    end = ended(case, folded(case.played().by_tokens()))
    pairs = zip(end.errors, case.asked_again, strict=True)
    assert all(error.startswith(begin) for error, begin in pairs), end.errors


def test_what_was_mended_is_never_told_in_the_models_words() -> None:
    for case in CASES:
        for repair in case.reads.repairs:
            what, where = repair.split()
            assert what.isalpha()
            assert where.removeprefix("tool_calls[0]") in (
                *("content", "reasoning_content", "", ".function.name"),
                *(f".function.arguments{key}" for key in ("", ".a")),
            )
