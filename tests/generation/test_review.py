"""An answer that breaks its format is made again, if it may be, or reported as it is."""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from mlx_server import limits
from mlx_server.engine.messages import Generate
from mlx_server.events import Event, Finished, Repaired, TextDelta, TokenCounts, Violation
from mlx_server.families.json_families import PLAIN
from mlx_server.generation.generate import RetryingAnswer
from mlx_server.generation.plan import plan, retry_row
from mlx_server.generation.review import Review
from mlx_server.messages import Conversation, Message
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.prepare import ModelSpec, prepare
from mlx_server.requests import ALL_REPAIRS, GenerateRequest, JsonFormat, RepairPolicy
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
