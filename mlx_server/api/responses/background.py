"""A response that is made whether anyone waits for it or not."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from mlx_server.api.responses.event_log import EventLog
from mlx_server.api.responses.items import Wire
from mlx_server.api.responses.run import Events, Run
from mlx_server.errors import Overloaded, ServerError

BUSY_SECONDS = 1.0
"""After which it asks again for a place in the queue."""


class Background:
    def __init__(self, run: Run, events: Callable[[], Events], log: EventLog | None) -> None:
        """log: for one that is streamed."""
        self.run = run
        self.task: asyncio.Task[None] | None = None
        self._event_source = events
        run.log = log
        for chunk in run.output.queue():
            self._note(chunk)

    def discard(self) -> None:
        """Before it has begun."""
        if self.run.log:
            self.run.log.drop()

    def begin(self, turn: asyncio.Semaphore) -> asyncio.Task[None]:
        """turn: how many of its kind run at a time."""
        self.task = asyncio.create_task(self._work(turn))
        return self.task

    async def cancel(self) -> None:
        """It has ended when this returns, one way or the other."""
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
                    "The events of this response, or of all in the background together, take more "
                    "memory than they may. Ask for less, or without `stream`.",
                    code="response_too_large",
                )

    def _note(self, chunk: Wire) -> None:
        if self.run.log:
            self.run.log.add(chunk)
