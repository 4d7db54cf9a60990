"""One attempt at an answer: a request to an upstream, and the events of its response."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import msgspec

from mlx_server.errors import UpstreamFailed
from mlx_server.events import Event, TokenCounts
from mlx_server.system.turns import turn
from mlx_server.upstream.connection import UpstreamConnection, UpstreamStream
from mlx_server.upstream.pieces import read_piece
from mlx_server.upstream.reading import AnswerReader
from mlx_server.upstream.request import UpstreamRequest, without_media
from mlx_server.upstream.responses import END, Allowance
from mlx_server.upstream.usage import CHARACTERS_PER_TOKEN

LARGE = 16 << 10
"""The characters above which text is parsed in a thread."""


class UpstreamAttempt:
    def __init__(
        self,
        connection: UpstreamConnection,
        request: UpstreamRequest,
        stream: UpstreamStream,
        reader: AnswerReader,
        allowance: Allowance,
    ) -> None:
        self._connection = connection
        self._request = request
        self._stream = stream
        self._reader = reader
        self._allowance = allowance

    @classmethod
    async def begun(
        cls,
        connection: UpstreamConnection,
        request: UpstreamRequest,
        reader: AnswerReader,
        allowance: Allowance,
    ) -> "UpstreamAttempt":
        """Sends the request and waits until its answer begins. Raises ServerError if none does."""
        body = request.thinking.first() if request.thinking else request.body
        stream = await connection.open(request, body, allowance)
        return cls(connection, request, stream, reader, allowance)

    @property
    def counts(self) -> TokenCounts:
        return self._reader.counts

    @property
    def estimated_prompt_tokens(self) -> int:
        """The prompt's tokens, estimated by its characters until the upstream has counted them."""
        body = self._request.body
        asked = [without_media(body.get("messages") or []), body.get("prompt"), body.get("tools")]
        return len(msgspec.json.encode(asked)) // CHARACTERS_PER_TOKEN

    @property
    def is_unterminated(self) -> bool:
        return self._reader.is_unterminated

    async def aclose(self) -> None:
        """Closes the response, which ends the upstream's work on the answer."""
        await self._stream.aclose()

    async def events(self) -> AsyncGenerator[Event]:
        reader, thinking = self._reader, self._request.thinking
        async with aclosing(self._request_events()) as events:
            async for event in events:
                yield event
        if thinking and thinking.budget and reader.is_without_answer and not reader.needs_no_more:
            spent = reader.counts.completion_tokens
            body = thinking.second(reader.thoughts, reader.content, spent)
            for event in reader.close_thoughts(thinking.tags):
                yield event
            self._stream = await self._connection.open(self._request, body, self._allowance)
            async with aclosing(self._request_events()) as events:
                async for event in events:
                    yield event
        for event in await _made(reader.finish(), reader.size + reader.extra_size):
            yield event
            await turn()

    async def _request_events(self) -> AsyncGenerator[Event]:
        """Yields the events of one request's response, except those that `reader.finish` makes."""
        reader, connection = self._reader, self._connection
        values = connection.within_time(self._stream.values(), reader, self._allowance)
        try:
            async with connection.reading(), aclosing(values):
                async for value in values:
                    if value == END:
                        if not reader.has_begun:
                            break
                        return
                    piece = read_piece(value)
                    connection.saw_reasoning(piece.reasoning_field)
                    for part in reader.parts(piece):
                        for event in await _made(reader.feed(part), reader.held):
                            yield event
                            await turn()
                        await turn()
                    if reader.needs_no_more:
                        return
        finally:
            await self.aclose()
        if not reader.has_ended:
            raise UpstreamFailed(
                f"The upstream of {connection.id} ended its stream before the answer was complete."
            )


async def _made(events: Iterator[Event], size: int) -> Iterator[Event]:
    """The events, which are made in a thread if so many characters may be parsed for them at once:
    those of a call that ends, or at the end all that was held."""
    return iter(await asyncio.to_thread(list, events)) if size > LARGE else events
