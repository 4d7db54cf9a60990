"""One attempt at an answer: a request to an upstream, and the events of its response."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from mlx_server.errors import UpstreamFailed
from mlx_server.events import Event, TokenCounts
from mlx_server.upstream.connection import UpstreamConnection, UpstreamStream
from mlx_server.upstream.messages import without_media
from mlx_server.upstream.pieces import read_piece
from mlx_server.upstream.reading import CHARACTERS_PER_TOKEN, AnswerReader
from mlx_server.upstream.request_body import UpstreamRequest
from mlx_server.upstream.sse import END


class UpstreamAttempt:
    def __init__(
        self,
        connection: UpstreamConnection,
        request: UpstreamRequest,
        stream: UpstreamStream,
        reader: AnswerReader,
    ) -> None:
        self._connection = connection
        self._request = request
        self._stream = stream
        self._reader = reader

    @classmethod
    async def begun(
        cls, connection: UpstreamConnection, request: UpstreamRequest, reader: AnswerReader
    ) -> "UpstreamAttempt":
        """Sends the request and waits until its answer begins. Raises ServerError if none does."""
        body = request.thinking.first() if request.thinking else request.body
        return cls(connection, request, await connection.open(request, body), reader)

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
            self._stream = await self._connection.open(self._request, body)
            async with aclosing(self._request_events()) as events:
                async for event in events:
                    yield event
        for event in reader.finish():
            yield event

    async def _request_events(self) -> AsyncGenerator[Event]:
        """Yields the events of one request's response, except those that `reader.finish` makes."""
        reader, connection = self._reader, self._connection
        try:
            async with (
                connection.reading(),
                aclosing(
                    connection.within_idle(self._stream.values(), lambda: reader.has_ended)
                ) as values,
            ):
                async for value in values:
                    if value == END:
                        if not reader.has_begun:
                            break
                        return
                    piece = read_piece(value)
                    connection.saw_reasoning(piece.reasoning_field)
                    for event in reader.feed(piece):
                        yield event
                    if reader.needs_no_more:
                        return
        finally:
            await self.aclose()
        if not reader.has_ended:
            raise UpstreamFailed(
                f"The upstream of {connection.id} ended its stream before the answer was complete."
            )
