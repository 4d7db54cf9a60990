"""One answer from its first row to its last: led on, mended, or made once more."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from mlx_server import limits
from mlx_server.engine.client import Item
from mlx_server.engine.messages import Generate
from mlx_server.events import (
    Event,
    Finished,
    Mended,
    PromptProgress,
    ReasoningDelta,
    Repaired,
    TextDelta,
    ToolCallFinished,
    Unmet,
)
from mlx_server.generation.constraints import constrain_onward
from mlx_server.generation.output import Answer
from mlx_server.generation.plan import made_again
from mlx_server.messages import Conversation, Phase
from mlx_server.pool.prepare import Prepared
from mlx_server.repair.answers import Asked, Outcome, Said, asked_again, outcome
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest

_checks = asyncio.Semaphore(limits.CHECK_PROCESSES.value)
"""Each may keep a process busy for seconds."""


class Course:
    def __init__(
        self,
        prepared: Prepared,
        index: int,
        row: Generate,
        request: GenerateRequest,
        *,
        unchecked: bool,
    ) -> None:
        """unchecked: no grammar holds the answer's text to all that was asked of it."""
        self.finished = False
        self._prepared, self._index, self._request = prepared, index, request
        self._first = self._row = row
        self._answer = Answer(prepared, index, row, request)
        self._unchecked = unchecked
        accumulates = prepared.spec.repair.streaming == "accumulate"
        self._holds = unchecked and (request.whole or accumulates)
        self._held: list[Event] = []
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls = 0
        self._phase: Phase | None = None
        """Of the last text."""
        self._before: Finished | None = None
        """Of the attempts that were not taken."""
        self._wrong: Mended | None = None
        """With the last of them."""
        self._attempts = 0
        self._next: Generate | None = None

    def begin(self) -> Iterator[Event]:
        return self._answer.begin()

    def next_row(self) -> Generate | None:
        """A row that this answer goes on with."""
        row, self._next = self._next, None
        self._row = row or self._row
        return row

    async def feed(self, item: Item) -> AsyncIterator[Event]:
        for event in self._answer.feed(item):
            if isinstance(event, Finished):
                async for last in self._end(event):
                    yield last
            elif isinstance(event, PromptProgress):
                yield event
            else:
                self._hear(event)
                if not self._holds:
                    yield event
        if onward := self._answer.next_row():
            await self._lead_on(onward)

    async def _lead_on(self, row: Generate) -> None:
        assert isinstance(self._asked, Conversation)
        await in_thread(constrain_onward, self._prepared, self._request, self._asked, row)
        self._next = row

    def _hear(self, event: Event) -> None:
        match event:
            case TextDelta(_, text, _, phase):
                self._texts.append(text)
                self._phase = phase
            case ReasoningDelta(_, text):
                self._reasoning.append(text)
            case ToolCallFinished():
                self._calls += 1
        if self._holds:
            self._held.append(event)

    async def _end(self, finished: Finished) -> AsyncIterator[Event]:
        text = "".join(self._texts)
        found = Outcome(text)
        if self._unchecked or not (text.strip() or self._calls):
            found = await self._outcome(text, finished)
        if found.errors and self._holds and await self._make_again(text, found):
            self._before = self._counted(finished)
            return
        for event in self._told(text, found):
            yield event
        self.finished = True
        yield self._counted(finished)

    async def _outcome(self, text: str, finished: Finished) -> Outcome:
        if not isinstance(self._asked, Conversation):
            return Outcome(text)
        reasoning, ran_out = "".join(self._reasoning), self._answer.ran_out
        marks = self._prepared.family.call_marks(self._asked.tools)
        said = Said(text, reasoning, self._calls, finished.reason, ran_out, marks)
        asked = Asked(self._request.format, self._request.tool_choice)
        async with _checks:
            return await asyncio.to_thread(outcome, said, asked, self._prepared.spec.repair)

    @property
    def _asked(self) -> object:
        return self._request.prompts[self._index // self._request.n]

    async def _make_again(self, text: str, found: Outcome) -> bool:
        if self._attempts >= self._prepared.spec.repair.retries:
            return False
        assert isinstance(self._asked, Conversation)
        again = asked_again(self._asked, text, found.errors)
        self._next = await in_thread(
            made_again,
            self._prepared,
            self._request,
            again,
            self._first,
            model=self._prepared.id,
        )
        if self._next is None:
            return False
        self._attempts += 1
        self._wrong = "tools" if found.errors[0].startswith("tool_calls:") else "schema"
        self._answer = Answer(self._prepared, self._index, self._next, self._request)
        self._held, self._texts, self._reasoning, self._calls = [], [], [], 0
        return True

    def _told(self, text: str, found: Outcome) -> Iterator[Event]:
        promoted = ("reasoning", "content") in found.repairs
        if found.text == text:
            yield from self._held
        elif self._holds or promoted:
            yield from (event for event in self._held if not isinstance(event, TextDelta))
            yield TextDelta(self._index, found.text, phase=self._phase)
        if self._holds or promoted:
            for what, where in found.repairs:
                yield Repaired(self._index, what, where)
        if self._wrong and not found.errors:
            where = "tool_calls" if self._wrong == "tools" else "content"
            yield Repaired(self._index, self._wrong, where)
        for error in found.errors:
            yield Unmet(self._index, error)

    def _counted(self, finished: Finished) -> Finished:
        if (before := self._before) is None:
            return finished
        return replace(
            finished,
            completion_tokens=before.completion_tokens + finished.completion_tokens,
            reasoning_tokens=before.reasoning_tokens + finished.reasoning_tokens,
            cached_tokens=before.cached_tokens,
        )
