"""Continues, repairs or retries an answer of this server's engine until it is final."""

from collections.abc import AsyncIterator, Iterable, Iterator

from mlx_server.engine.messages import Generate, PromptLogprobs
from mlx_server.engine.row_stream import Item
from mlx_server.events import Event, TokenCounts
from mlx_server.generation.constraints import constrain_continuation
from mlx_server.generation.output import OutputProcessor
from mlx_server.generation.plan import retry_row
from mlx_server.generation.review import ReviewedAnswer
from mlx_server.messages import Conversation
from mlx_server.pool.prepare import PreparedModel
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest


class RetryingAnswer(ReviewedAnswer):
    """The answer to one prompt, across every row that was needed to produce it.

    A row that stops right after its reasoning is continued with the answer prefix. A rejected
    answer is generated again by another row.
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
        """unchecked: whether the grammar does not enforce all of the requested format."""
        super().__init__(index, request, prepared.family, prepared.spec.repair, unchecked=unchecked)
        self._prepared = prepared
        self._first_row = self._row = row
        self._answer = OutputProcessor(prepared, index, row, request)
        self._next: Generate | None = None

    def begin(self) -> Iterator[Event]:
        return self._answer.begin()

    def next_row(self) -> Generate | None:
        """Takes the row that is to continue this answer or generate it again, if there is one."""
        row, self._next = self._next, None
        self._row = row or self._row
        return row

    async def feed(self, item: Item) -> AsyncIterator[Event]:
        events: Iterable[Event] = self._answer.feed(item)
        if isinstance(item, PromptLogprobs):  # those of a long prompt take seconds
            events = await in_thread(list, events)
        for event in events:
            async for reported in self.review(event):
                yield reported
        if row := self._answer.next_row():
            await self._continue(row)

    async def _continue(self, row: Generate) -> None:
        assert isinstance(self._prompt, Conversation)
        await in_thread(constrain_continuation, self._prepared, self._request, self._prompt, row)
        self._next = row

    @property
    def _attempt_counts(self) -> TokenCounts:
        return self._answer.counts

    @property
    def _reasoning_ran_out(self) -> bool:
        return self._answer.reasoning_ran_out

    @property
    def _is_unterminated(self) -> bool:
        return self._answer.is_unterminated

    async def _begin_again(self, conversation: Conversation) -> bool:
        self._next = await in_thread(
            retry_row,
            self._prepared,
            self._request,
            conversation,
            self._first_row,
            model=self._prepared.id,
        )
        if self._next is None:
            return False
        self._answer = OutputProcessor(self._prepared, self._index, self._next, self._request)
        return True
