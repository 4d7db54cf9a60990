"""A transport and an event loop for protocols: no network, and a clock that a test moves."""

import json
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import Mock


class Timer:
    def __init__(self, due: float, callback: Callable[..., object], given: tuple[Any, ...]) -> None:
        self.due = due
        self.callback = callback
        self.given = given
        self.is_pending = True

    def cancel(self) -> None:
        self.is_pending = False


class Loop:
    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[Timer] = []
        self._tasks: list[Coroutine[Any, Any, None]] = []

    def time(self) -> float:
        return self._now

    def call_later(self, seconds: float, callback: Callable[..., object], *given: Any) -> Timer:
        self._timers.append(Timer(self._now + seconds, callback, given))
        return self._timers[-1]

    def create_task(self, task: Coroutine[Any, Any, None]) -> Mock:
        """The task runs when the test says so."""
        self._tasks.append(task)
        return Mock()

    def run_tasks(self) -> None:
        """Runs tasks that wait for nothing."""
        while self._tasks:
            try:
                self._tasks.pop(0).send(None)
            except StopIteration:
                continue
            raise AssertionError("the task waits")

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        for timer in [each for each in self._timers if each.is_pending and each.due <= self._now]:
            timer.is_pending = False
            timer.callback(*timer.given)

    def close(self) -> None:
        for task in self._tasks:
            task.close()


class Transport:
    def __init__(self, address: str = "10.0.0.1") -> None:
        self._address = address
        self._protocol: Any = None
        self.sent = b""
        self.is_closed = False
        self.is_aborted = False
        self.reads = True

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return (self._address, 5) if name == "peername" else None

    def set_write_buffer_limits(self, **limits: int) -> None: ...

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def refusal(self) -> tuple[int, str]:
        """The status and the message of the one answer, after which the connection was closed."""
        assert self.is_closed
        head, _, body = self.sent.partition(b"\r\n\r\n")
        assert b"\r\ncontent-type: application/json" in head
        assert b"\r\nconnection: close" in head
        return int(head.split()[1]), json.loads(body)["error"]["message"]
