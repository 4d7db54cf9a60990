"""An answer that breaks its format is made again, if it may be, or reported as it is."""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from mlx_server import limits
from mlx_server.engine.messages import Generate
from mlx_server.events import Event, Finished, Repaired, TextDelta, TokenCounts, Violation
from mlx_server.families import family_named
from mlx_server.families.json_families import PLAIN
from mlx_server.generation.generate import RetryingAnswer
from mlx_server.generation.plan import plan, retry_row
from mlx_server.generation.review import (
    CheckedAnswer,
    RawAnswer,
    Review,
    check_answer,
    retry_conversation,
    retry_message,
)
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.prepare import ModelSpec, prepare
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
from tests.generation.scripted import END, finished, said, text_of

Attempt = Sequence[Event]

NOT_TWICE = JsonFormat({"type": "array", "uniqueItems": True}, strict=False)
ASKED = Conversation((Message("user", "Numbers?"),))
REQUEST = GenerateRequest("m", (ASKED,), format=NOT_TWICE, buffered=True)
WRONG = "[3, 3]"
VIOLATION = Violation(0, "$: [3, 3] has non-unique elements")


class Written:
    """Attempts at an answer that the test has written down."""

    def __init__(self, first: Attempt, *further: Attempt) -> None:
        self.next: Attempt = first
        self.further = list(further)
        self.again: list[Conversation] = []

    counts = TokenCounts()
    reasoning_ran_out = is_unterminated = False

    @property
    def attempt(self) -> "Written":
        return self

    async def begin_again(self, conversation: Conversation) -> bool:
        self.again.append(conversation)
        if self.further:
            self.next = self.further.pop(0)
        return bool(self.next)


def attempt(text: str, tokens: int = 5) -> Attempt:
    return [TextDelta(0, text), Finished(0, "stop", TokenCounts(tokens, 0, text_tokens=tokens))]


def reviewed(
    *attempts: Attempt, request: GenerateRequest = REQUEST, policy: RepairPolicy = ALL_REPAIRS
) -> tuple[list[Event], Written]:
    written = Written(*attempts)
    review = Review(0, request, PLAIN, policy, written, unchecked=True)

    async def read() -> list[Event]:
        events = list[Event]()
        while written.next:
            attempt, written.next = written.next, ()
            events += await review.reviewed(attempt)
        return events

    return asyncio.run(read()), written


def test_it_is_made_again_and_its_tokens_count() -> None:
    events, answer = reviewed(attempt(WRONG, 5), attempt("[3]", 3))
    end = Finished(0, "stop", TokenCounts(8, 0, text_tokens=8))
    assert events == [TextDelta(0, "[3]"), Repaired(0, "schema", "content"), end]
    (again,) = answer.again
    assert again.messages[: len(ASKED.messages)] == ASKED.messages
    assert any("non-unique" in message.content for message in again.messages)


def test_a_continued_message_is_checked_with_its_beginning() -> None:
    begun = replace(
        ASKED, messages=(*ASKED.messages, Message("assistant", "[3,")), continue_final_message=True
    )
    request = replace(REQUEST, prompts=(begun,))
    for rest, errors in ((" 4]", []), (" 3]", [VIOLATION])):
        events, answer = reviewed(attempt(rest), request=request)
        assert events[1:-1] == errors
        assert answer.again == []


LISTING = GenerateRequest(
    "m",
    (Conversation((Message("user", "Numbers?"),)),),
    format=JsonFormat({"type": "array", "uniqueItems": True}, strict=False),
    buffered=True,
)


def test_a_rejected_answer_has_another_row(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    roomy = replace(spec, context_length=1000)
    prepared = prepare(roomy, lambda *_: None, upcast=True)
    planned = plan(prepared, LISTING)
    assert planned.unchecked
    answer = RetryingAnswer(prepared, 0, planned.rows[0], LISTING, unchecked=True)

    async def fed(text: str) -> list[Event]:
        items = [*said(tokenizer.encode(text)), *said(END, finish="stop")]
        return [event for item in items for event in await answer.feed(item)]

    async def both() -> tuple[list[Event], Generate | None, list[Event]]:
        return await fed("[3, 3]"), answer.next_row(), await fed("[3]")

    first, row, second = asyncio.run(both())
    assert first == []
    assert row
    prompt = tokenizer.decode(row.prompt)
    assert "Numbers?" in prompt
    assert "non-unique" in prompt
    assert row.grammar == planned.rows[0].grammar
    assert text_of(second) == "[3]"
    assert Repaired(0, "schema", "content") in second
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in ("[3, 3]", "[3]"))
    assert [end.counts.completion_tokens for end in finished(second)] == [tokens]
    assert answer.finished
    assert answer.next_row() is None


def test_a_list_of_errors_has_room_of_its_own_beside_two_answers(spec: ModelSpec) -> None:
    prepared = prepare(replace(spec, context_length=100_000), lambda *_: None, upcast=True)
    request = replace(LISTING, max_tokens=50)
    row = plan(prepared, request).rows[0]
    room = len(row.prompt) + 2 * 50 + limits.CORRECTION_TOKENS + len(prepared.family.answer_prefix)

    def again(errors: int) -> Generate | None:
        said = Conversation((*ASKED.messages, Message("user", " x" * errors)))
        return retry_row(prepared, request, said, row)

    most = bisect_left(range(room), True, key=lambda errors: not again(errors)) - 1
    last = again(most)
    assert last
    assert 0 < last.max_tokens == room - len(last.prompt) <= 2


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
    unreadable = asking(JsonFormat({"properties": {"a": {"pattern": "("}}}))
    said = RawAnswer('{"a": "b"}')
    assert check_answer(said, unreadable, ALL_REPAIRS) == CheckedAnswer(said.text)


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
    return check_answer(said, asked, RepairPolicy(**case.repair))


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
