"""Continues, repairs or retries an answer until it is final."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from mlx_server import limits
from mlx_server.engine.messages import Generate
from mlx_server.engine.row_stream import Item
from mlx_server.events import (
    BuiltInCall,
    Event,
    Finished,
    PromptProgress,
    ReasoningDelta,
    Repaired,
    RepairKind,
    TextDelta,
    TokenCounts,
    TokensSoFar,
    ToolCallFinished,
    ToolCallStarted,
    Violation,
    total,
)
from mlx_server.generation.constraints import constrain_continuation
from mlx_server.generation.output import OutputProcessor
from mlx_server.generation.plan import retry_row
from mlx_server.messages import Conversation, Phase
from mlx_server.pool.prepare import PreparedModel
from mlx_server.repair.answers import (
    CheckedAnswer,
    RawAnswer,
    Requirements,
    check_answer,
    retry_conversation,
)
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest, Prompt

_checks = asyncio.Semaphore(limits.CHECK_PROCESSES.value)
"""Limits concurrent checks, since each may keep a process busy for seconds."""


class RetryingAnswer:
    """The answer to one prompt, across every row that was needed to produce it.

    A row that stops right after its reasoning is continued with the answer prefix. Text that
    breaks the requested format is repaired or, if that fails, generated again with the errors in
    the prompt.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        index: int,
        row: Generate,
        request: GenerateRequest,
        *,
        unchecked: bool,
    ) -> None:
        """`unchecked`: the grammar does not enforce all of the requested format."""
        self.finished = False
        self._prepared, self._index, self._request = prepared, index, request
        self._first_row = self._row = row
        self._answer = OutputProcessor(prepared, index, row, request)
        self._unchecked = unchecked
        accumulates = prepared.spec.repair.streaming == "accumulate"
        self._begun = _begun_text(request.prompts[index // request.n])
        """The text of a message that this answer continues. It can't be taken back, so such an
        answer is neither repaired nor generated again."""
        self._is_buffered = unchecked and not self._begun and (request.buffered or accumulates)
        self._buffered: list[Event] = []
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls = 0
        self._attempted_call = False
        self._phase: Phase | None = None
        """Phase of the most recent text delta."""
        self._rejected: Finished | None = None
        """Token counts summed over the rejected attempts."""
        self._rejection: RepairKind | None = None
        """Why the most recent attempt was rejected."""
        self._attempts = 0
        self._next: Generate | None = None

    def begin(self) -> Iterator[Event]:
        return self._answer.begin()

    def next_row(self) -> Generate | None:
        """The row that continues this answer, if any."""
        row, self._next = self._next, None
        self._row = row or self._row
        return row

    @property
    def counts(self) -> TokenCounts:
        """The tokens so far, those of rejected attempts included."""
        if (before := self._rejected) is None:
            return self._answer.counts
        both = total([before.counts, self._answer.counts])
        return replace(both, cached_tokens=before.cached_tokens)

    async def feed(self, item: Item) -> AsyncIterator[Event]:
        for event in self._answer.feed(item):
            if isinstance(event, Finished):
                async for last in self._end(event):
                    yield last
            elif isinstance(event, PromptProgress):
                yield event
            elif isinstance(event, TokensSoFar):
                yield self._with_rejected_tokens(event)
            else:
                self._collect(event)
                if not self._is_buffered:
                    yield event
        if row := self._answer.next_row():
            await self._continue(row)

    async def _continue(self, row: Generate) -> None:
        assert isinstance(self._conversation, Conversation)
        await in_thread(
            constrain_continuation, self._prepared, self._request, self._conversation, row
        )
        self._next = row

    def _collect(self, event: Event) -> None:
        match event:
            case TextDelta(phase=phase):
                self._texts.append(event.separated)
                self._phase = phase
            case ReasoningDelta():
                self._reasoning.append(event.separated)
            case ToolCallStarted() | BuiltInCall():
                self._attempted_call = True
            case ToolCallFinished():
                self._calls += 1
        if self._is_buffered:
            self._buffered.append(event)

    async def _end(self, finished: Finished) -> AsyncIterator[Event]:
        text = "".join(self._texts)
        found = CheckedAnswer(text)
        if self._begun and self._unchecked:
            whole = await self._check(self._begun + text, finished)
            found = CheckedAnswer(text, errors=whole.errors)
        elif self._unchecked or not (self._begun or text.strip() or self._calls):
            found = await self._check(text, finished)
        if found.errors and self._is_buffered and await self._retry(text, found):
            self._rejected = self._with_rejected_usage(finished)
            return
        for event in self._final_events(text, found):
            yield event
        self.finished = True
        yield self._with_rejected_usage(finished)

    async def _check(self, text: str, finished: Finished) -> CheckedAnswer:
        if not isinstance(self._conversation, Conversation):
            return CheckedAnswer(text)
        reasoning, ran_out = "".join(self._reasoning), self._answer.reasoning_ran_out
        delimiters = self._prepared.family.call_delimiters(self._conversation.tools)
        raw = RawAnswer(
            text,
            reasoning,
            self._calls,
            finished.reason,
            ran_out,
            delimiters,
            self._answer.is_unterminated,
            self._attempted_call,
        )
        required = Requirements(self._request.format, self._request.tool_choice)
        async with _checks:
            return await asyncio.to_thread(check_answer, raw, required, self._prepared.spec.repair)

    @property
    def _conversation(self) -> object:
        return self._request.prompts[self._index // self._request.n]

    async def _retry(self, text: str, found: CheckedAnswer) -> bool:
        if self._attempts >= self._prepared.spec.repair.retries:
            return False
        assert isinstance(self._conversation, Conversation)
        again = retry_conversation(self._conversation, text, found.errors)
        self._next = await in_thread(
            retry_row,
            self._prepared,
            self._request,
            again,
            self._first_row,
            model=self._prepared.id,
        )
        if self._next is None:
            return False
        self._attempts += 1
        self._rejection = "tools" if found.errors[0].startswith("tool_calls:") else "schema"
        self._answer = OutputProcessor(self._prepared, self._index, self._next, self._request)
        self._buffered, self._texts, self._reasoning, self._calls = [], [], [], 0
        self._attempted_call = False
        return True

    def _final_events(self, text: str, found: CheckedAnswer) -> Iterator[Event]:
        promoted = ("reasoning", "content") in found.repairs
        if found.text == text:
            yield from self._buffered
        elif self._is_buffered or promoted:
            yield from (event for event in self._buffered if not isinstance(event, TextDelta))
            yield TextDelta(self._index, found.text, phase=self._phase)
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
            raw=before.raw + finished.raw,
            cached_tokens=before.cached_tokens,
        )


def _begun_text(prompt: Prompt) -> str:
    begun = prompt.continued if isinstance(prompt, Conversation) else None
    return begun.content if begun else ""
