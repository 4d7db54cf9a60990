"""Reviews a complete answer, which is accepted, repaired or generated again."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from weakref import WeakValueDictionary

from mlx_server import limits
from mlx_server.events import (
    Answer,
    Event,
    Finished,
    PromptProgress,
    PromptScored,
    ReasoningDelta,
    Repaired,
    RepairKind,
    TextDelta,
    TokenCounts,
    TokensSoFar,
    Violation,
    total,
)
from mlx_server.families.base import ModelFamily
from mlx_server.messages import Conversation
from mlx_server.repair.allowed import RepairPolicy
from mlx_server.repair.answers import (
    CheckedAnswer,
    RawAnswer,
    Requirements,
    check_answer,
    retry_conversation,
)
from mlx_server.requests import GenerateRequest, Prompt
from mlx_server.system.turns import turn

_checks = WeakValueDictionary[str, asyncio.Semaphore]()
"""Limits the concurrent checks of each client, which may keep a process busy for seconds."""


def turns_to_check(client: str) -> asyncio.Semaphore:
    return _checks.setdefault(client, asyncio.Semaphore(limits.CHECK_PROCESSES))


class ReviewedAnswer(ABC):
    """The answer to one prompt, across every attempt that was needed to produce it.

    Text that breaks the requested format is repaired or, if that fails, generated again with the
    errors in the prompt.
    """

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        family: ModelFamily,
        policy: RepairPolicy,
        *,
        unchecked: bool,
    ) -> None:
        """unchecked: whether no grammar enforces all of the requested format."""
        self.finished = False
        self._index, self._request = index, request
        self._family, self._policy = family, policy
        self._unchecked = unchecked
        self._begun = _begun_text(self._prompt)
        """The text of a message that this answer continues. It can't be changed any more, so the
        answer is checked but neither repaired nor generated again."""
        is_held = request.buffered or policy.streaming == "accumulate"
        self._is_buffered = unchecked and not self._begun and is_held
        self._buffered: list[Event] = []
        self._repairs: set[Repaired] = set()
        """The repairs that were reported of any attempt."""
        self._collected = Answer()
        """The events of the current attempt."""
        self._rejected: Finished | None = None
        """The token counts and raw output of all rejected attempts together."""
        self._rejection: RepairKind | None = None
        """The reason for which the last attempt was rejected."""
        self._attempts = 0
        self._has_shown_thoughts = False
        """Whether the client has the reasoning of a rejected attempt, and is to get no other."""

    @property
    @abstractmethod
    def _attempt_counts(self) -> TokenCounts:
        """The tokens of the current attempt so far."""

    @property
    @abstractmethod
    def _reasoning_ran_out(self) -> bool:
        """Whether the attempt's reasoning used its whole budget and was cut off."""

    @property
    @abstractmethod
    def _is_unterminated(self) -> bool:
        """Whether the attempt ended within its reasoning."""

    @abstractmethod
    async def _begin_again(self, conversation: Conversation) -> bool:
        """Begin another attempt with this prompt. Returns False if that is not possible."""

    async def _nudged(self) -> bool:
        """Begin another attempt after an empty one. Returns False if there is to be none, which is
        the default."""
        return False

    @property
    def counts(self) -> TokenCounts:
        """The tokens generated so far, with those of rejected attempts."""
        if (before := self._rejected) is None:
            return self._attempt_counts
        both = total([before.counts, self._attempt_counts])
        return replace(both, cached_tokens=before.cached_tokens)

    async def review(self, event: Event) -> AsyncIterator[Event]:
        """Yield the events to report after this event of the attempt. Events of a buffered answer
        are held back until it is accepted."""
        if isinstance(event, Finished):
            async for last in self._end_attempt(event):
                yield last
        elif isinstance(event, PromptProgress | PromptScored):
            yield event
        elif isinstance(event, TokensSoFar):
            yield self._with_rejected_tokens(event)
        else:
            self._collected.add(event)
            is_known = isinstance(event, Repaired) and event in self._repairs
            if self._is_buffered:
                self._buffered.append(event)
            elif not is_known and not self._is_further_thought(event):
                yield event
            if isinstance(event, Repaired):
                self._repairs.add(event)

    def _is_further_thought(self, event: Event) -> bool:
        return self._has_shown_thoughts and isinstance(event, ReasoningDelta)

    async def _end_attempt(self, finished: Finished) -> AsyncIterator[Event]:
        text = self._collected.text
        is_empty = not (self._begun or text.strip() or self._collected.calls)
        found = CheckedAnswer(text)
        if self._begun and self._unchecked:
            whole = await self._check(self._begun + text, finished)
            found = CheckedAnswer(text, errors=whole.errors)
        elif self._unchecked or is_empty:
            found = await self._check(text, finished)
        if found.errors and self._is_buffered and await self._retry(text, found):
            self._rejected = self._with_rejected_usage(finished)
            return
        is_promoted = bool(found.repairs) and self._request.format is not None
        may_be_nudged = is_empty and finished.reason == "stop" and not is_promoted
        if may_be_nudged and await self._nudged():
            self._rejected = self._with_rejected_usage(finished)
            self._forget("empty")
            return
        for event in self._final_events(text, found):
            await turn()  # there may be tens of thousands
            yield event
        self.finished = True
        yield self._with_rejected_usage(finished)

    async def _check(self, text: str, finished: Finished) -> CheckedAnswer:
        if not isinstance(self._prompt, Conversation):
            return CheckedAnswer(text)
        raw = RawAnswer(
            text,
            self._collected.thoughts,
            len(self._collected.calls),
            finished.reason,
            self._reasoning_ran_out,
            self._family.call_delimiters(self._prompt.tools),
            self._is_unterminated,
            self._collected.attempts_call,
        )
        required = Requirements(self._request.format, self._request.tool_choice)
        async with turns_to_check(self._request.client):
            return await asyncio.to_thread(check_answer, raw, required, self._policy)

    @property
    def _prompt(self) -> Prompt:
        return self._request.prompts[self._index // self._request.n]

    async def _retry(self, text: str, found: CheckedAnswer) -> bool:
        if self._attempts >= self._policy.retries:
            return False
        assert isinstance(self._prompt, Conversation)
        if not await self._begin_again(retry_conversation(self._prompt, text, found.errors)):
            return False
        self._attempts += 1
        self._forget("tools" if found.errors[0].startswith("tool_calls:") else "schema")
        return True

    def _forget(self, rejection: RepairKind) -> None:
        """Clear what was collected of an attempt, which was rejected for this reason."""
        self._rejection = rejection
        is_shown = bool(self._collected.thoughts) and not self._is_buffered
        self._has_shown_thoughts = self._has_shown_thoughts or is_shown
        self._buffered, self._collected = [], Answer()

    def _final_events(self, text: str, found: CheckedAnswer) -> Iterator[Event]:
        promoted = ("reasoning", "content") in found.repairs
        if found.text == text:
            yield from self._buffered
        elif self._is_buffered or promoted:
            yield from (event for event in self._buffered if not isinstance(event, TextDelta))
            yield TextDelta(self._index, found.text, phase=self._collected.phase)
        if self._is_buffered or promoted:
            for what, where in found.repairs:
                yield Repaired(self._index, what, where)
        if self._rejection and not found.errors:
            where = "tool_calls" if self._rejection == "tools" else "content"
            yield Repaired(self._index, self._rejection, where)
        for error in found.errors:
            yield Violation(self._index, error)

    def _with_rejected_tokens(self, counted: TokensSoFar) -> TokensSoFar:
        if (before := self._rejected) is None:
            return counted
        return replace(
            counted,
            completion_tokens=before.completion_tokens + counted.completion_tokens,
            reasoning_tokens=before.reasoning_tokens + counted.reasoning_tokens,
            cached_tokens=before.cached_tokens,
        )

    def _with_rejected_usage(self, finished: Finished) -> Finished:
        if (before := self._rejected) is None:
            return finished
        return replace(
            finished,
            completion_tokens=before.completion_tokens + finished.completion_tokens,
            reasoning_tokens=before.reasoning_tokens + finished.reasoning_tokens,
            text_tokens=before.text_tokens + finished.text_tokens,
            further_prompt_tokens=before.further_prompt_tokens + finished.further_prompt_tokens,
            raw=before.raw + finished.raw,
            cached_tokens=before.cached_tokens,
        )


def _begun_text(prompt: Prompt) -> str:
    begun = prompt.continued if isinstance(prompt, Conversation) else None
    return begun.content if begun else ""
