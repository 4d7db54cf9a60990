"""The spine: a request to the events of its answers. Every endpoint folds these."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import replace

from mlx_server.engine.client import Answers, Item
from mlx_server.engine.messages import Admitted, Generate, Logprobs, Scored, Token
from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.events import Event, Finished, FinishReason, Started, TextDelta, TokenLogprob
from mlx_server.families.base import Rendered
from mlx_server.families.tokenizer import Tokenizer
from mlx_server.messages import Conversation
from mlx_server.parsers.stops import StopStrings
from mlx_server.pool.pool import Model, Pool
from mlx_server.requests import GenerateRequest, SamplingChoices, SamplingParams


async def generate(request: GenerateRequest, pool: Pool) -> AsyncGenerator[Event]:
    """Raises what is wrong with the request before `Started`; closing it frees its rows."""
    async with pool.acquire(request.model, len(request.prompts) * request.n) as model:
        prompts = await asyncio.to_thread(_rendered, model, request)
        rows = list(_rows(model, request, prompts))
        async with pool.engine.generate(rows) as feed:
            items = await _until_admitted(feed, len(rows))
            yield _started(model, prompts)
            answers = {row.row: Answer(model, i, row, request) for i, row in enumerate(rows)}
            for answer in answers.values():
                for event in answer.begin():
                    yield event
            while True:
                for item in items:
                    answer = answers[item.row]
                    for event in answer.feed(item):
                        yield event
                    if answer.finished:
                        pool.engine.cancel([item.row])
                if all(answer.finished for answer in answers.values()):
                    return
                items = await feed.take()


async def _until_admitted(feed: Answers, rows: int) -> list[Item]:
    """Waits until the engine has taken every row; returns what else came by then."""
    items: list[Item] = []
    while sum(isinstance(item, Admitted) for item in items) < rows:
        items += await feed.take()
    return items


class Answer:
    """One answer: the engine's items in, events out."""

    def __init__(self, model: Model, index: int, row: Generate, request: GenerateRequest) -> None:
        self.finished = False
        self._index = index
        self._row = row
        self._echo = request.echo
        self._tokenizer = model.checkpoint.tokenizer
        self._text = self._tokenizer.detokenizer()
        self._parser = model.family.make_parser(index)
        self._stops = StopStrings(request.stop)
        self._tokens = 0
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> Iterator[Event]:
        if self._echo and not self._row.score:
            yield TextDelta(self._index, self._prompt_text())

    def feed(self, item: Item) -> Iterator[Event]:
        if self.finished:
            return
        match item:
            case Token():
                yield from self._token(item)
            case Scored(_, logprobs):
                yield from self._scored(logprobs)

    def _scored(self, logprobs: list[Logprobs]) -> Iterator[Event]:
        unknown = Logprobs(None, [])
        tokens = zip(self._row.prompt, [unknown, *logprobs], strict=True)
        scored = tuple(_token_logprob(self._tokenizer, *token) for token in tokens)
        yield TextDelta(self._index, self._prompt_text(), scored)
        if not self._row.max_tokens:
            yield self._finished("length")

    def _prompt_text(self) -> str:
        return self._tokenizer.decode(self._row.prompt)

    def _token(self, token: Token) -> Iterator[Event]:
        self._tokens += 1
        if token.finish == "stop":  # the stop token itself is no part of the answer
            yield from self._finish("stop")
            return
        if token.logprobs:
            self._logprobs.append(_token_logprob(self._tokenizer, token.id, token.logprobs))
        yield from self._passed(self._parser.feed(token.id, self._text.feed(token.id)))
        if self._stops.matched:
            yield self._finished("stop")
        elif token.finish:
            yield from self._finish(token.finish)

    def _finish(self, reason: FinishReason) -> Iterator[Event]:
        yield from self._passed(self._parser.finish(self._text.finish()))
        if self._logprobs:  # of last tokens that had no text
            yield from self._passed([TextDelta(self._index, "")])
        yield from self._stops.finish()
        yield self._finished("stop" if self._stops.matched else reason)

    def _passed(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, TextDelta):
                logprobs, self._logprobs = tuple(self._logprobs), []
                yield from self._stops.feed(replace(event, logprobs=logprobs))
            elif not self._stops.matched:
                yield event

    def _finished(self, reason: FinishReason) -> Finished:
        self.finished = True
        return Finished(self._index, reason, self._tokens)


def _rendered(model: Model, request: GenerateRequest) -> list[Rendered]:
    """Runs in a thread: rendering and tokenising a long prompt takes a while."""
    prompts = [_tokens(model, prompt) for prompt in request.prompts]
    for asked, prompt in zip(request.prompts, prompts, strict=True):
        param = "messages" if isinstance(asked, Conversation) else "prompt"
        if not prompt.tokens:
            raise BadRequest("The prompt is empty.", param=param)
        if len(prompt.tokens) >= model.context_length:
            raise ContextTooLong(
                f"The prompt has {len(prompt.tokens)} tokens; the context of {model.id} holds "
                f"{model.context_length}, the answer included. Shorten the prompt.",
                param=param,
            )
    return prompts


def _tokens(model: Model, prompt: Conversation | str | tuple[int, ...]) -> Rendered:
    match prompt:
        case Conversation():
            return model.family.render(model.checkpoint, prompt)
        case str():
            return Rendered(model.checkpoint.tokenizer.encode(prompt, add_special_tokens=True))
        case ids:
            if outside := [token for token in ids if not 0 <= token < model.vocabulary]:
                raise BadRequest(
                    f"Token id {outside[0]} is outside the vocabulary: {model.id} knows the ids "
                    f"from 0 to {model.vocabulary - 1}.",
                    param="prompt",
                )
            return Rendered(list(ids))


def _rows(model: Model, request: GenerateRequest, prompts: list[Rendered]) -> Iterator[Generate]:
    sampling = _sampling(model, request)
    stops = sorted(model.family.stops(model.checkpoint))
    asked = model.spec.max_tokens if request.max_tokens is None else request.max_tokens
    score = request.echo and (request.logprobs is not None or asked == 0)
    for prompt in prompts:
        room = model.context_length - len(prompt.tokens)
        for choice in range(request.n):
            # Each of n answers to one seed draws on its own.
            seed = None if sampling.seed is None else sampling.seed + choice
            yield Generate(
                row=0,
                model=model.id,
                prompt=prompt.tokens,
                max_tokens=room if asked is None else min(asked, room),
                stop_tokens=stops,
                sampling=replace(sampling, seed=seed),
                score=score,
            )


def _sampling(model: Model, request: GenerateRequest) -> SamplingParams:
    """The request's choices, else the owner's, else the publisher's, else OpenAI's."""
    if outside := [token for token in request.logit_bias if not 0 <= token < model.vocabulary]:
        raise BadRequest(
            f"`logit_bias` names token {outside[0]}; {model.id} knows the ids from 0 to "
            f"{model.vocabulary - 1}.",
            param="logit_bias",
        )
    choices: SamplingChoices = {
        **model.checkpoint.sampling,
        **model.spec.choices,
        **request.choices,
    }
    return SamplingParams(
        **choices,
        logit_bias=request.logit_bias,
        seed=request.seed,
        logprobs=request.logprobs,
    )


def _started(model: Model, prompts: list[Rendered]) -> Started:
    return Started(
        model=model.id,
        prompt_tokens=sum(len(prompt.tokens) for prompt in prompts),
        cached_tokens=0,
        ignored=tuple(dict.fromkeys(name for prompt in prompts for name in prompt.ignored)),
    )


def _token_logprob(tokenizer: Tokenizer, token: int, found: Logprobs) -> TokenLogprob:
    def entry(token: int, logprob: float | None) -> TokenLogprob:
        return TokenLogprob(tokenizer.spelling(token), tokenizer.bytes_of(token), logprob)

    return replace(entry(token, found.chosen), top=tuple(entry(*top) for top in found.top))
