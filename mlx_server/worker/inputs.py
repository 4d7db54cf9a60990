"""The inputs of an engine's steps, apart from the commands' contents: everything that two processes
could see differently."""

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from mlx_server.engine import messages
from mlx_server.engine.messages import Command

Inbox = queue.SimpleQueue[bytes]

WAKE = b""
"""A frame without a command: it wakes the main thread when a background task has finished."""

END = b"\xc1"
"""A frame that msgpack never makes: the server is gone."""


class Inputs(Protocol):
    @property
    def clock(self) -> Callable[[], float]:
        """Reads a clock, in seconds."""

    def is_done(self, task: Future[Any]) -> bool:
        """Whether a background task has ended."""

    def take(self, pause: float | None) -> list[Command]:
        """Returns all received commands; waits up to `pause` seconds for one, None waits for ever.

        Raises EOFError when the server is gone."""

    def wake(self) -> None:
        """Ends the waiting of `take`. Other threads call it."""


class OwnInputs:
    """The inputs of an engine process: commands come from the server."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def is_done(self, task: Future[Any]) -> bool:
        return task.done()

    def wake(self) -> None:
        self._inbox.put(WAKE)

    def take(self, pause: float | None) -> list[Command]:
        taken = []
        if pause != 0:
            with suppress(queue.Empty):
                taken.append(self._inbox.get(timeout=pause))
        while not self._inbox.empty():
            taken.append(self._inbox.get())
        if END in taken:
            raise EOFError
        frames = [frame for frame in taken if frame != WAKE]
        return [command for frame in frames for command in messages.decode_commands(frame)]
