"""Finds stop strings across token boundaries, without ever passing on a part of them."""

from collections.abc import Sequence
from dataclasses import replace

from mlx_server.events import TextDelta


class StopStrings:
    """Passes text on as soon as it can no longer be the beginning of a stop string.

    The match that is complete first counts, so that the result does not depend on chunk size.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held: list[TextDelta] = []
        self.match: str | None = None
        """The stop string that was found."""

    @property
    def matched(self) -> bool:
        return self.match is not None

    def feed(self, delta: TextDelta) -> list[TextDelta]:
        if self.matched:
            return []
        if not self._stops:
            return [delta]
        self._held.append(delta)
        text = "".join(held.separated for held in self._held)
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, begin = min(found)
            self.match = text[begin:end]
            released = self._release(begin)
            self._held = []
            return released
        return self._release(len(text) - self._undecided(text))

    def finish(self) -> list[TextDelta]:
        held, self._held = self._held, []
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of the text that may begin a stop string."""
        return max(
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(text)) + 1)
            if text.endswith(stop[:size])
        )

    def _release(self, size: int) -> list[TextDelta]:
        """Returns the first `size` characters. Log probabilities go with a delta's first
        character."""
        released: list[TextDelta] = []
        kept: list[TextDelta] = []
        for delta in self._held:
            before, separator = len(delta.separator), delta.separator
            taken = min(size, before + len(delta.text))
            size -= taken
            if taken <= before and delta.text:
                size = taken = 0  # a separator is not released without its text
            rest = delta.text[max(0, taken - before) :]
            if rest or (kept and not taken):  # a delta without text keeps its place
                logprobs = () if taken else delta.logprobs
                separator = "" if taken else separator
                kept.append(replace(delta, text=rest, logprobs=logprobs, separator=separator))
            if taken or not (rest or kept):
                released.append(replace(delta, text=delta.text[: max(0, taken - before)]))
        self._held = kept
        return released
