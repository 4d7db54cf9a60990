from collections.abc import Callable

from mlx_server.events import Event, ToolCallDelta, ToolCallFinished


class DuplicateCallFilter:
    """The events of a call that may be the call before once more: held until they differ.

    before: the arguments of that call.
    """

    def __init__(self, before: str, emit: Callable[[Event], None]) -> None:
        self._before = before
        self._emit = emit
        self._compared = 0
        self._held: list[Event] | None = []

    @property
    def silent(self) -> bool:
        """Whether nothing was told of it."""
        return self._held is not None

    def emit(self, event: Event) -> None:
        if self._held is None:
            self._emit(event)
            return
        self._held.append(event)
        if not self._same(event):
            told, self._held = self._held, None
            for held in told:
                self._emit(held)

    def _same(self, event: Event) -> bool:
        if isinstance(event, ToolCallDelta):
            at, self._compared = self._compared, self._compared + len(event.arguments)
            return self._before.startswith(event.arguments, at)
        return not isinstance(event, ToolCallFinished) or self._compared == len(self._before)
