"""A response that is generated in the background, whether or not a client waits for it."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from mlx_server.api.responses.event_log import EventLog
from mlx_server.api.responses.items import Wire
from mlx_server.api.responses.run import Events, Run
from mlx_server.errors import Overloaded, ServerError

BUSY_SECONDS = 1.0
"""Pause before a response that found the queue full tries again."""


class Background:
    def __init__(self, run: Run, events: Callable[[], Events], log: EventLog | None) -> None:
        """`events` makes a new source for each attempt to start; `log` is for streaming."""
        self.run = run
        self.task: asyncio.Task[None] | None = None
        self._event_source = events
        run.log = log
        for chunk in run.output.queue():
            self._note(chunk)

    def discard(self) -> None:
        """Drops a response that has not begun."""
        if self.run.log:
            self.run.log.drop()

    def begin(self, turn: asyncio.Semaphore) -> asyncio.Task[None]:
        """Starts its task. `turn` limits how many background responses run at once."""
        self.task = asyncio.create_task(self._work(turn))
        return self.task

    async def cancel(self) -> None:
        """Cancels the response and waits until it has ended."""
        assert self.task
        if not self.run.ended:
            self.task.cancel()
        await asyncio.wait({self.task})

    async def _work(self, turn: asyncio.Semaphore) -> None:
        run = self.run
        try:
            async with turn:
                await self._start_when_free()
                await self._note_all(run.chunks())
        except asyncio.CancelledError:
            await self._note_all(run.cancel())
        except Exception as error:
            await self._note_all(run.fail(error))
        finally:
            await run.aclose()
            if run.log:
                run.log.end()

    async def _start_when_free(self) -> None:
        while True:
            try:
                await self.run.start()
                return
            except Overloaded:
                await asyncio.sleep(BUSY_SECONDS)
                self.run.renew(self._event_source())

    async def _note_all(self, chunks: AsyncGenerator[Wire]) -> None:
        async for chunk in chunks:
            self._note(chunk)
            if self.run.log and self.run.log.is_full and not self.run.ended:
                raise ServerError(
                    "The events of this response, or of all background responses together, are "
                    "over their memory limit. Set a lower `max_output_tokens`, or leave out "
                    "`stream`.",
                    code="response_too_large",
                )

    def _note(self, chunk: Wire) -> None:
        if self.run.log:
            self.run.log.add(chunk)
