"""Generates the events of a request for an upstream model, which another server runs: several
attempts may be needed for an answer, and an attempt may take two requests."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from mlx_server import limits
from mlx_server.errors import AdapterNotFound, ServerError, UpstreamFailed
from mlx_server.events import Event, Started, TokenCounts, total
from mlx_server.generation.rendering import check_media, without_volatile_lines
from mlx_server.generation.review import Review
from mlx_server.grammars.formats import check as check_format
from mlx_server.messages import Conversation
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.pool.models import UpstreamModel
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec, completed, sampling, sampling_choices, token_limit
from mlx_server.request_threads import in_thread
from mlx_server.requests import (
    GenerateRequest,
    JsonFormat,
    NamedTool,
    Prompt,
)
from mlx_server.system.logs import log_model
from mlx_server.system.turns import turn
from mlx_server.upstream.connection import UpstreamConnection, UpstreamStream
from mlx_server.upstream.pieces import CHARACTERS_PER_TOKEN, read_piece
from mlx_server.upstream.reading import AnswerReader, ReadingOptions
from mlx_server.upstream.request import UpstreamRequest, check, ignored, request_of, without_media
from mlx_server.upstream.responses import END, Allowance

log = logging.getLogger("mlx_server.upstream")


async def generate_upstream(
    request: GenerateRequest, pool: Pool, model: UpstreamModel
) -> AsyncGenerator[Event]:
    """Yield the events, as `generate` does, for an upstream model."""
    answers: list[UpstreamAnswer] = []
    with pool.row_slots.take(len(request.prompts) * request.n, request.client):
        log_model(model.id, model.family.name)
        request, left_out = without_volatile_lines(request)
        await in_thread(_check, pool, model, request, model=model.id)
        unused = ignored(model.can, request)
        request = with_defaults(model.spec, request)
        numbers = range(len(request.prompts) * request.n)
        answers += [UpstreamAnswer(model, index, request) for index in numbers]
        try:
            await _all_begun(answers)
            yield Started(
                model.id,
                0,  # the upstream sends the number of the prompt's tokens only at the end
                unused,
                service_tier=request.reported_tier,
                sampling=sampling(model.spec, request),
                normalized=left_out,
                estimated_prompt_tokens=sum(answer.estimated_prompt_tokens for answer in answers),
                unfinished=partial(_unfinished, answers),
            )
            async with aclosing(merged([answer.events() for answer in answers])) as events:
                async for event in events:
                    yield event
        finally:
            for answer in answers:
                await answer.aclose()


def _check(pool: Pool, model: UpstreamModel, request: GenerateRequest) -> None:
    _, adapter = pool.models.split(request.model)
    if name := request.adapter or adapter:
        raise AdapterNotFound(
            f"{model.id} is served by another server and has no adapter {name[:100]!r}.",
            param="adapter" if request.adapter else "model",
        )
    check_media(model.spec, request, model.can.takes)
    check(model.id, model.can, request, model.thoughts)
    if isinstance(request.format, JsonFormat):  # the answer is checked, so no grammar is needed
        check_format(replace(request.format, strict=False), request.format_param)
    elif request.format:
        check_format(request.format, request.format_param)


def with_defaults(spec: ModelSpec, request: GenerateRequest) -> GenerateRequest:
    """The request, with the settings of models.yaml for what the client does not set."""
    prompts = (
        completed(spec, prompt) if isinstance(prompt, Conversation) else prompt
        for prompt in request.prompts
    )
    return replace(
        request,
        choices=sampling_choices(spec, request),
        max_tokens=token_limit(spec, request),
        prompts=tuple(prompts),
    )


def _unfinished(answers: Sequence["UpstreamAnswer"]) -> TokenCounts:
    return total(answer.review.counts for answer in answers if not answer.review.finished)


async def _all_begun(answers: Sequence["UpstreamAnswer"]) -> None:
    """Wait until every answer has begun. If one fails, cancel the others and raise its error."""
    begun = [asyncio.create_task(answer.begin()) for answer in answers]
    try:
        await asyncio.gather(*begun)
    finally:
        for each in begun:
            each.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


async def merged(streams: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[Event]:
    """Yield the events of all streams as they come. The first error is raised and ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield event
        return
    queue = asyncio.Queue[Event | BaseException | None](maxsize=4 * len(streams))

    async def pump(stream: AsyncGenerator[Event]) -> None:
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    await queue.put(event)
        except Exception as error:
            await queue.put(error)
        await queue.put(None)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(pumps)
        while left:
            match await queue.get():
                case None:
                    left -= 1
                case BaseException() as error:
                    raise error
                case event:
                    yield event
    finally:
        for each in pumps:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


LARGE = 16 << 10
"""The characters above which text is parsed in a thread."""


@dataclass
class UpstreamAttempt:
    _connection: UpstreamConnection
    _request: UpstreamRequest
    _stream: UpstreamStream
    reader: AnswerReader
    _allowance: Allowance
    _is_first: bool = True
    """Whether the stream is that of the first request."""
    _is_over: bool = False
    """Whether the answer has ended."""
    _second: Mapping[str, Any] | None = None
    """The body of the second request, which is still to be sent."""

    @property
    def estimated_prompt_tokens(self) -> int:
        """The prompt's tokens, estimated by its characters until the upstream has counted them."""
        body = self._request.body
        asked = [without_media(body.get("messages") or []), body.get("prompt"), body.get("tools")]
        return len(msgspec.json.encode(asked)) // CHARACTERS_PER_TOKEN

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
        reader = self.reader
        value = await self._stream.next(reader.progress, has_ended=reader.has_ended)
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
        reader, thinking = self.reader, self._request.thinking
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


class UpstreamAnswer:
    """An upstream model's answer to one prompt, across every request that was needed for it."""

    def __init__(self, model: UpstreamModel, index: int, request: GenerateRequest) -> None:
        must_call = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
        self.review = Review(
            index,
            request,
            model.family,
            model.spec.repair,
            self,
            unchecked=must_call or isinstance(request.format, JsonFormat),
            # of an attempt that turns out to be empty nothing is shown, if that is possible
            holds_all=True,
            nudges=1,
        )
        self._model, self._index, self._request = model, index, request
        self._prompt = request.prompts[index // request.n]
        self._allowance = Allowance(limits.UPSTREAM_ANSWER_SECONDS)
        self._attempt: UpstreamAttempt | None = None

    async def begin(self) -> None:
        """Send the request and wait until its answer begins. Raises ServerError if it does not."""
        self._attempt = await self._begun_attempt(self._prompt)

    @property
    def estimated_prompt_tokens(self) -> int:
        """The estimated tokens of the prompt. They are 0 for all but the first of `n` answers,
        whose prompt is counted once."""
        if self._attempt is None or self._index % self._request.n:
            return 0
        return self._attempt.estimated_prompt_tokens

    async def aclose(self) -> None:
        self._allowance.release()
        if self._attempt:
            await self._attempt.aclose()

    async def events(self) -> AsyncGenerator[Event]:
        while not self.review.finished:
            assert self._attempt
            for event in await self.review.reviewed(await self._attempt.take() or ()):
                yield event
                await turn()

    @property
    def attempt(self) -> AnswerReader:
        assert self._attempt
        return self._attempt.reader

    async def begin_again(self, conversation: Conversation) -> bool:
        try:
            self._attempt = await self._begun_attempt(conversation, again=True)
        except ServerError as error:  # the rejected answer is kept
            log.warning("%s could not be asked again: %s", self._model.id, error.code)
            return False
        return True

    async def _begun_attempt(self, prompt: Prompt, *, again: bool = False) -> UpstreamAttempt:
        asked = request_of(
            self._model.can,
            self._request,
            prompt,
            self._index % self._request.n,
            thoughts=self._model.thoughts,
            tells_format=again,
        )
        asked = replace(asked, client=self._request.client, hops=self._request.hops)
        connection, allowance = self._model.connection, self._allowance
        body = asked.thinking.first() if asked.thinking else asked.body
        stream = await connection.open(asked, body, allowance)
        return UpstreamAttempt(connection, asked, stream, self._reader(prompt), allowance)

    def _reader(self, prompt: Prompt) -> AnswerReader:
        model, request, spec = self._model, self._request, self._model.spec
        chat = prompt if isinstance(prompt, Conversation) else Conversation(())
        begun = chat.continued
        context = ParseContext(
            index=self._index,
            tools=() if request.tool_choice == "none" else chat.tools,
            ends_with="" if begun is None or begun.content else model.opening,
            repair=spec.repair,
            holds_calls=True,
            continues=begun is not None,
        )
        return AnswerReader(
            ReadingOptions(
                family=model.family,
                opening=model.opening,
                context=context,
                is_chat=isinstance(prompt, Conversation),
                stops=request.stop,
                parallel=request.parallel_calls and not isinstance(request.tool_choice, NamedTool),
                expects_calls_as_text=not model.can.tools,
                logprobs=request.logprobs,
                keeps_raw=bool(request.include_raw),
                bills_prompt=self._index % request.n == 0,
            )
        )
