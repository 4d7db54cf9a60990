"""Lets the event loop go on while its tasks work through large answers.

In each iteration of a loop all these tasks together may work for 5 ms, so that neither one answer
nor many of them at once keep other requests waiting.
"""

import asyncio
import time
from collections import deque
from weakref import WeakKeyDictionary

TURN_SECONDS = 0.005


class _Turns:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.began: float | None = None
        """The time of the first turn in this iteration; None if there was none."""
        self.waiting = deque[asyncio.Future[None]]()

    def next_iteration(self) -> None:
        self.began = None
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done():  # it is done if its task was cancelled
                waiter.set_result(None)
                self.began = time.perf_counter()
                self.loop.call_soon(self.next_iteration)
                return


_turns: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns]" = WeakKeyDictionary()


async def turn() -> None:
    """Returns at once while this iteration of the event loop has time left, else in a later one.
    To be awaited before each piece of work, which should take much less than 5 ms."""
    loop = asyncio.get_running_loop()
    turns = _turns.get(loop)
    if turns is None:
        turns = _turns[loop] = _Turns(loop)
    if turns.began is None:
        turns.began = time.perf_counter()
        loop.call_soon(turns.next_iteration)
    elif turns.waiting or time.perf_counter() - turns.began > TURN_SECONDS:
        waiter = loop.create_future()
        turns.waiting.append(waiter)
        await waiter
        turns.began = time.perf_counter()
