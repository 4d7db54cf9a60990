"""Holds the events of a call back until it is certain that they are to be reported."""

from collections.abc import Callable
from typing import Protocol

from mlx_server.events import Event, ToolCallDelta, ToolCallFinished

Emit = Callable[[Event], None]


class HeldCall(Protocol):
    @property
    def is_silent(self) -> bool:
        """Whether none of its events has been reported."""

    def emit(self, event: Event) -> None:
        """Takes the next event of the call."""

    def retract(self) -> bool:
        """Drops the arguments so far, unless some were reported. Returns whether it did."""


class CompleteCall:
    """A call that is reported once it is complete."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: list[Event] = []
        self.is_silent = True

    def emit(self, event: Event) -> None:
        self._held.append(event)
        if isinstance(event, ToolCallFinished):
            self.is_silent = False
            for held in self._held:
                self._emit(held)

    def retract(self) -> bool:
        self._held = _without_arguments(self._held)
        return self.is_silent


class RepeatedCall:
    """A call that is reported as soon as its arguments differ from those of the call before."""

    def __init__(self, before: str, emit: Emit, complete: CompleteCall | None = None) -> None:
        """complete: holds the call until it is complete, once it differs; None if it need not be
        held."""
        self._before = before
        self._complete = complete
        self._emit = complete.emit if complete else emit
        self._compared = 0
        self._held: list[Event] | None = []

    @property
    def is_silent(self) -> bool:
        return self._held is not None or bool(self._complete and self._complete.is_silent)

    def emit(self, event: Event) -> None:
        if self._held is None:
            self._emit(event)
            return
        self._held.append(event)
        if not self._is_same(event):
            held, self._held = self._held, None
            for each in held:
                self._emit(each)

    def retract(self) -> bool:
        if self._held is None:
            return self._complete is not None and self._complete.retract()
        self._held, self._compared = _without_arguments(self._held), 0
        return True

    def _is_same(self, event: Event) -> bool:
        if isinstance(event, ToolCallDelta):
            at, self._compared = self._compared, self._compared + len(event.arguments)
            return self._before.startswith(event.arguments, at)
        return not isinstance(event, ToolCallFinished) or self._compared == len(self._before)


def _without_arguments(events: list[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, ToolCallDelta)]
