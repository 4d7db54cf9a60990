"""What is reported of the events that parsers make, for answers of this server and of others."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from mlx_server.events import (
    Event,
    Finished,
    FinishReason,
    Repaired,
    TextDelta,
    TokenCounts,
    TokenLogprob,
    ToolCallFinished,
    Violation,
)
from mlx_server.parsers.text_pieces import StopStrings


class OutputProcessor:
    """Ends an answer at a stop string, or after its call if it may have only one. Gives texts their
    log probabilities, and reports all of a text before any other output."""

    def __init__(self, index: int, stops: Sequence[str], *, parallel: bool) -> None:
        """parallel: whether several calls are allowed; if not, the first one ends the answer."""
        self.finished = False
        self._index = index
        self._stops = StopStrings(stops)
        self._parallel = parallel
        self._calls = 0
        """The complete calls so far."""

    @property
    def is_complete(self) -> bool:
        """Whether a stop string or the one call that is allowed ends the answer."""
        return self._stops.matched or (self._calls > 0 and not self._parallel)

    def _logprobs_of(self, delta: TextDelta) -> Sequence[TokenLogprob]:
        """Takes the log probabilities of the text's tokens out of those that are pending."""
        return ()

    def _report(self, event: Event) -> Iterator[Event]:
        match event:
            case TextDelta():
                if logprobs := self._logprobs_of(event):
                    event = replace(event, logprobs=tuple(logprobs))
                yield from self._stops.feed(event)
            case Repaired() | Violation():  # a report is not output and ends no text
                yield event
            case _:
                yield from self._stops.finish()
                self._calls += isinstance(event, ToolCallFinished)
                yield event

    def _end(self, reason: FinishReason, counts: TokenCounts) -> Finished:
        """The answer's last event, without what only one kind of row has."""
        self.finished = True
        return Finished(self._index, reason, **asdict(counts), stop_string=self._stops.match)
