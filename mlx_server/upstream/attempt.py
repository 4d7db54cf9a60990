"""One attempt at an answer: a request to an upstream, and the events of its response."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
        self._is_first, self._is_over = True, False
        """Whether the stream is that of the first request, and whether the answer has ended."""
        self._second: Mapping[str, Any] | None = None
        """The body of the second request, which is still to be sent."""

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

    async def take(self) -> Sequence[Event] | None:
        """The next events of the answer; None after its last."""
        if self._is_over:
            return None
        if self._second:
            body, self._second = self._second, None
            self._stream = await self._connection.open(self._request, body, self._allowance)
        reader = self._reader
        value = await self._stream.next(reader)
        if value is None or value == END:
            is_complete = reader.has_ended or (value == END and reader.has_begun)
            return await self._end_request(is_complete=is_complete)
        piece = read_piece(value)
        self._connection.saw_reasoning(piece.reasoning_field)
        events: list[Event] = []
        for part in reader.parts(piece):
            events += await _made(reader.feed(part), reader.held)
            await turn()
        if reader.needs_no_more:
            events += await self._end_request(is_complete=True)
        return events

    async def _end_request(self, *, is_complete: bool) -> Sequence[Event]:
        """Ends the answer, or prepares a second request for it."""
        reader, thinking = self._reader, self._request.thinking
        await self._stream.aclose()
        if not is_complete:
            raise UpstreamFailed(
                f"The upstream of {self._connection.id} ended its stream before the answer was "
                "complete."
            )
        is_first, self._is_first = self._is_first, False
        has_answer = reader.needs_no_more or not reader.is_without_answer
        if is_first and thinking and thinking.budget and not has_answer:
            spent = reader.counts.completion_tokens
            self._second = thinking.second(reader.thoughts, reader.content, spent)
            return list(reader.close_thoughts(thinking.tags))
        self._is_over = True
        return await _made(reader.finish(), reader.size + reader.extra_size)


async def _made(events: Iterator[Event], size: int) -> list[Event]:
    """The events, which are made in a thread if so many characters may be parsed for them at once:
    those of a call that ends, or at the end all that was held."""
    return await asyncio.to_thread(list, events) if size > LARGE else list(events)
