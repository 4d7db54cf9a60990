"""What an endpoint's output makes of events: one body, or the chunks of a stream."""

from collections.abc import Iterable

import msgspec

from mlx_server.events import Event
from mlx_server.http.sse import Output, StreamedOutput
from tests.api.wire import Json


def body_of(output: Output, events: Iterable[Event]) -> Json:
    for event in events:
        output.add(event)
    return on_the_wire(output.body())


def chunks_of(output: StreamedOutput, events: Iterable[Event]) -> list[Json]:
    chunks = [on_the_wire(chunk) for event in events for chunk in output.chunks(event)]
    return [*chunks, *map(on_the_wire, output.end())]


def on_the_wire(body: object) -> Json:
    """The body as a client reads it: parts of it may be encoded already."""
    decoded: Json = msgspec.json.decode(msgspec.json.encode(body))
    return decoded
