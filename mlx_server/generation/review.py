"""Reviews a complete answer, which is accepted, repaired or generated again."""

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

from mlx_server import limits
from mlx_server.errors import CompilerUnavailable
from mlx_server.events import (
    Answer,
    Event,
    Finished,
    FinishReason,
    PromptProgress,
    ReasoningDelta,
    Repaired,
    RepairKind,
    TextDelta,
    TokenCounts,
    Violation,
    total,
)
from mlx_server.families.base import ModelFamily
from mlx_server.grammars.compiled import CheckedValue, CheckValue, ask
from mlx_server.messages import Conversation, Message
from mlx_server.requests import (
    GenerateRequest,
    JsonFormat,
    NamedTool,
    Prompt,
    RepairPolicy,
    ToolChoice,
)
from mlx_server.system.sandbox.parent import Stopped
from mlx_server.tool_parsers.model_json import json_text, parsed


class CheckFailed(Exception):
    """The validation took too long, or the schema is invalid."""


def schema_errors(value: Any, schema: Any, seconds: float = limits.CHECK_SECONDS) -> list[str]:
    """Returns the errors, each as "path: what". Blocks up to `seconds`; raises CheckFailed.

    A schema can make validation take for ever (a pattern that backtracks, references that double at
    every level), so the process that compiles schemas does it.
    """
    try:
        reply = ask(CheckValue(json.dumps(value), json.dumps(schema), seconds))
    except (Stopped, CompilerUnavailable) as why:
        raise CheckFailed(str(why)) from None
    if not isinstance(reply, CheckedValue):
        raise CheckFailed("the schema can't be followed")
    return reply.errors


CONTENT = "content"

NO_ANSWER = f"{CONTENT}: there is no answer"


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """A finished answer as it was parsed."""

    text: str = ""
    reasoning: str = ""
    calls: int = 0
    """The number of complete tool calls."""
    reason: FinishReason = "stop"
    reasoning_ran_out: bool = False
    """Whether the reasoning was ended by its token budget."""
    call_delimiters: tuple[str, ...] = ()
    """The delimiters that open tool calls in the model's call format."""
    is_unterminated: bool = False
    """Whether the reasoning was not closed, so that the model had not begun to answer."""
    attempted_call: bool = False
    """Whether the model began a call that was not made: of a tool that it does not have, or one
    that stayed incomplete."""


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    text: str
    repairs: tuple[tuple[RepairKind, str], ...] = ()
    """The kind and place of each repair, for `Repaired` events."""
    errors: tuple[str, ...] = ()
    """Reasons to retry, each as "path: what". If no retry is allowed, the text is the answer."""


def check_answer(raw: RawAnswer, asked: GenerateRequest, allowed: RepairPolicy) -> CheckedAnswer:
    """Checks an answer; it may block for seconds if there is a schema."""
    json = asked.format if isinstance(asked.format, JsonFormat) else None
    if raw.calls or raw.reason == "length":
        return CheckedAnswer(raw.text)
    if asked.tool_choice == "required" or isinstance(asked.tool_choice, NamedTool):
        return CheckedAnswer(raw.text, errors=(_no_call(asked.tool_choice),))
    if raw.text.strip():
        return _followed_schema(raw.text, json, allowed)
    found = _promoted(raw, asked, allowed)
    return found or CheckedAnswer(raw.text, errors=(NO_ANSWER,) if json else ())


def _promoted(
    raw: RawAnswer, asked: GenerateRequest, allowed: RepairPolicy
) -> CheckedAnswer | None:
    """Uses the reasoning as the text of an answer that has nothing else; None if it can't be.

    Reasoning that was cut off or not closed is no answer. If a format is required, only JSON that
    follows it is used, because other formats can't be checked.
    """
    reasoning = raw.reasoning.strip()
    meant_to_call = raw.attempted_call or any(each in reasoning for each in raw.call_delimiters)
    if not (allowed.mistakes and reasoning) or raw.reasoning_ran_out or meant_to_call:
        return None
    if asked.format is None:
        if raw.is_unterminated:
            return None
        return CheckedAnswer(reasoning, (("reasoning", CONTENT),))
    if not isinstance(asked.format, JsonFormat):
        return None
    found = _followed_schema(reasoning, asked.format, allowed)
    if found.errors:
        return None
    return CheckedAnswer(found.text, (("reasoning", CONTENT), *found.repairs))


def _followed_schema(text: str, json: JsonFormat | None, allowed: RepairPolicy) -> CheckedAnswer:
    if json is None:
        return CheckedAnswer(text)
    found = json_text(text)
    if found is None or (found[1] and not allowed.mistakes):
        return CheckedAnswer(
            text, errors=("content: it is not one JSON value, each key once, and nothing else",)
        )
    inside, repairs = found
    try:
        errors = tuple(schema_errors(parsed(inside), json.schema))
    except CheckFailed:  # an answer that can't be checked is accepted
        errors = ()
    return CheckedAnswer(inside, tuple((kind, CONTENT) for kind in repairs), errors)


def _no_call(choice: ToolChoice) -> str:
    tool = f"the tool {choice.name}" if isinstance(choice, NamedTool) else "one of the tools"
    return f"tool_calls: {tool} has to be called, and none was"


def retry_message(errors: Sequence[str]) -> Message:
    """The message that shows the model its errors."""
    listed = "\n".join(f"- {error}" for error in errors)
    return Message(
        "user",
        f"Your answer is not what was asked for:\n{listed}\n"
        "Give the whole answer again with this put right, and nothing else: no apology, no "
        "explanation.",
    )


def retry_conversation(
    conversation: Conversation, text: str, errors: Sequence[str]
) -> Conversation:
    """The conversation with the rejected answer's text, if it has any, and the retry message."""
    answered = (Message("assistant", text),) if text else ()
    turns = (*answered, retry_message(errors))
    return replace(conversation, messages=(*conversation.messages, *turns))


_checks = WeakValueDictionary[str, asyncio.Semaphore]()
"""Limits the concurrent checks of each client, which may keep a process busy for seconds."""


def turns_to_check(client: str) -> asyncio.Semaphore:
    return _checks.setdefault(client, asyncio.Semaphore(limits.CHECK_PROCESSES))


EMPTY = "content: the upstream's answer is empty"

NUDGE = Message("user", "Your answer was empty. Give your answer now.")
"""The message that asks an upstream again after an empty answer."""


class Attempt(Protocol):
    @property
    def counts(self) -> TokenCounts:
        """The tokens so far."""

    @property
    def reasoning_ran_out(self) -> bool:
        """Whether the reasoning used its whole budget and was cut off."""

    @property
    def is_unterminated(self) -> bool:
        """Whether the attempt ended within its reasoning."""


class AnswerAttempts(Protocol):
    """The attempts at one answer."""

    @property
    def attempt(self) -> Attempt:
        """The current one."""

    async def begin_again(self, conversation: Conversation) -> bool:
        """Begin another attempt with this prompt. Returns False if that is not possible."""


class Review:
    """Turns the events of all attempts at one answer into those that are reported.

    Text that breaks the requested format is repaired or, if that fails, generated again with the
    errors in the prompt.
    """

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        family: ModelFamily,
        policy: RepairPolicy,
        attempts: AnswerAttempts,
        *,
        unchecked: bool,
        nudges: int = 0,
        holds_all: bool = False,
        blocks: bool = False,
    ) -> None:
        """unchecked: whether no grammar enforces all of the requested format. nudges: how often an
        empty answer is asked for again. holds_all: whether an answer that is not streamed is held
        back in any case, since it may turn out to be empty.
        blocks: whether a check, which may take seconds, may block, so that nothing is awaited."""
        self.finished = False
        self._index, self._request = index, request
        self._family, self._policy = family, policy
        self._attempts = attempts
        self._unchecked, self._blocks = unchecked, blocks
        begun = self._prompt.continued if isinstance(self._prompt, Conversation) else None
        self._begun = begun.content if begun else ""
        """The text of a message that this answer continues. It can't be changed any more, so the
        answer is checked but neither repaired nor generated again."""
        self._is_buffered = request.buffered and not self._begun and (unchecked or holds_all)
        self._buffered: list[Event] = []
        self._repairs: set[Repaired] = set()
        """The repairs that were reported of any attempt."""
        self._collected = Answer()
        """The events of the current attempt."""
        self._rejected: Finished | None = None
        """The token counts and raw output of all rejected attempts together."""
        self._rejection: RepairKind | None = None
        """The reason for which the last attempt was rejected."""
        self._retries = 0
        self._nudges_left = nudges
        self._has_shown_thoughts = False
        """Whether the client has the reasoning of a rejected attempt, and is to get no other."""

    @property
    def counts(self) -> TokenCounts:
        """The tokens generated so far, with those of rejected attempts."""
        return self._with_rejected(self._attempts.attempt.counts)

    def _with_rejected(self, counts: TokenCounts) -> TokenCounts:
        if self._rejected is None:
            return counts
        before = self._rejected.counts
        return replace(total([before, counts]), cached_tokens=before.cached_tokens)

    async def reviewed(self, events: Iterable[Event]) -> list[Event]:
        """The events to report after these events of the attempt. Events of a buffered answer are
        held back until it is accepted."""
        reported: list[Event] = []
        for event in events:
            if isinstance(event, Finished):
                reported += await self._end_attempt(event)
            elif isinstance(event, PromptProgress):
                reported.append(event)
            else:
                self._collected.add(event)
                is_known = isinstance(event, Repaired) and event in self._repairs
                if self._is_buffered:
                    self._buffered.append(event)
                elif not is_known and not (
                    self._has_shown_thoughts and isinstance(event, ReasoningDelta)
                ):
                    reported.append(event)
                if isinstance(event, Repaired):
                    self._repairs.add(event)
        return reported

    async def _end_attempt(self, finished: Finished) -> list[Event]:
        """The last events of the answer; none if there is to be another attempt."""
        text = self._collected.text
        is_empty = not (self._begun or text.strip() or self._collected.calls)
        checked = CheckedAnswer(text)
        if self._begun and self._unchecked:
            whole = await self._check(self._begun + text, finished)
            checked = CheckedAnswer(text, errors=whole.errors)
        elif self._unchecked or is_empty:
            checked = await self._check(text, finished)
        is_promoted = bool(checked.repairs) and self._request.format is not None
        may_be_nudged = is_empty and finished.reason == "stop" and not is_promoted
        if (checked.errors and self._is_buffered and await self._retry(text, checked)) or (
            may_be_nudged and await self._nudge()
        ):
            self._rejected = self._with_rejected_usage(finished)
            return []
        self.finished = True
        return [*self._final_events(text, checked), self._with_rejected_usage(finished)]

    async def _check(self, text: str, finished: Finished) -> CheckedAnswer:
        if not isinstance(self._prompt, Conversation):
            return CheckedAnswer(text)
        raw = RawAnswer(
            text,
            self._collected.thoughts,
            len(self._collected.calls),
            finished.reason,
            self._attempts.attempt.reasoning_ran_out,
            self._family.call_delimiters(self._prompt.tools),
            self._attempts.attempt.is_unterminated,
            self._collected.attempts_call,
        )
        if self._blocks:
            return check_answer(raw, self._request, self._policy)
        async with turns_to_check(self._request.client):
            return await asyncio.to_thread(check_answer, raw, self._request, self._policy)

    @property
    def _prompt(self) -> Prompt:
        return self._request.prompts[self._index // self._request.n]

    async def _retry(self, text: str, checked: CheckedAnswer) -> bool:
        if self._retries >= self._policy.retries:
            return False
        assert isinstance(self._prompt, Conversation)
        conversation = retry_conversation(self._prompt, text, checked.errors)
        if not await self._attempts.begin_again(conversation):
            return False
        self._retries += 1
        self._forget("tools" if checked.errors[0].startswith("tool_calls:") else "schema")
        return True

    async def _nudge(self) -> bool:
        if not self._nudges_left or not isinstance(self._prompt, Conversation):
            return False
        nudged = replace(self._prompt, messages=(*self._prompt.messages, NUDGE))
        if not await self._attempts.begin_again(nudged):
            return False
        self._nudges_left -= 1
        self._forget("empty")
        return True

    def _forget(self, rejection: RepairKind) -> None:
        """Clear what was collected of an attempt, which was rejected for this reason."""
        self._rejection = rejection
        is_shown = bool(self._collected.thoughts) and not self._is_buffered
        self._has_shown_thoughts = self._has_shown_thoughts or is_shown
        self._buffered, self._collected = [], Answer()

    def _final_events(self, text: str, checked: CheckedAnswer) -> Iterator[Event]:
        is_empty = not (checked.text.strip() or self._collected.calls or checked.errors)
        if is_empty and self._rejection == "empty":
            checked = replace(checked, errors=(EMPTY,))
        promoted = ("reasoning", "content") in checked.repairs
        if checked.text == text:
            yield from self._buffered
        elif self._is_buffered or promoted:
            yield from (event for event in self._buffered if not isinstance(event, TextDelta))
            yield TextDelta(self._index, checked.text, phase=self._collected.phase)
        if self._is_buffered or promoted:
            for what, where in checked.repairs:
                yield Repaired(self._index, what, where)
        if self._rejection and not checked.errors:
            where = "tool_calls" if self._rejection == "tools" else "content"
            yield Repaired(self._index, self._rejection, where)
        for error in checked.errors:
            yield Violation(self._index, error)

    def _with_rejected_usage(self, finished: Finished) -> Finished:
        if (before := self._rejected) is None:
            return finished
        counts = self._with_rejected(finished.counts)
        return replace(finished, counts=counts, raw=before.raw + finished.raw)
