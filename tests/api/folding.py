"""What an endpoint's output makes of events: one body, or the chunks of a stream."""

from collections.abc import Iterable

from mlx_server.api.handlers import Output, StreamedOutput
from mlx_server.events import Event
from tests.api.wire import Json


def body_of(output: Output, events: Iterable[Event]) -> Json:
    for event in events:
        output.add(event)
    return dict(output.body())


def chunks_of(output: StreamedOutput, events: Iterable[Event]) -> list[Json]:
    chunks = [dict(chunk) for event in events for chunk in output.chunks(event)]
    return [*chunks, *map(dict, output.end())]
