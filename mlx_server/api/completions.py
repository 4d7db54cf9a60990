"""`POST /v1/completions` on the wire, as OpenAI documents it."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated

import msgspec
from fastapi import Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api.accumulator import (
    DEFAULT_REPORTING,
    Accumulator,
    CompletionsOutput,
    Reporting,
    Wire,
)
from mlx_server.api.fields import EMPTY_IS_UNSET, WHOLE, Items, check_stream_options
from mlx_server.api.formats import ConstrainedBody
from mlx_server.api.handlers import documented, read, respond
from mlx_server.errors import BadRequest
from mlx_server.events import Event, Finished, PromptProgress, TextDelta, TokenLogprob
from mlx_server.http.errors import prompt_too_long
from mlx_server.http.resumable import resumed
from mlx_server.http.security import keyed_router
from mlx_server.request_threads import in_thread_if_large
from mlx_server.requests import GenerateRequest, Infill, Prompt

Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31), WHOLE]], Field(fail_fast=True)]
"""Token ids. WHOLE is Python: other threads run between two of them, as with `Items`."""
TokenIds = Annotated[Ids, Field(min_length=1)]
Texts = Annotated[Items[str], Field(min_length=1, max_length=limits.PROMPTS)]
TokenLists = Annotated[Items[TokenIds], Field(min_length=1, max_length=limits.PROMPTS)]


class CompletionBody(ConstrainedBody):
    prompt: str | TokenIds | Texts | TokenLists
    max_tokens: Annotated[int, Field(ge=-1), WHOLE] | None = None
    """-1 stands for as many tokens as fit the context."""
    logprobs: Annotated[int, Field(ge=0, le=limits.TOP_LOGPROBS), WHOLE] | None = None
    suffix: Annotated[str | None, EMPTY_IS_UNSET] = None
    """The text after the answer, which then is what is missing between the prompt and it."""
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1), WHOLE] | None = None
    skip_special_tokens: bool | None = None
    """vLLM's: if false, the text has the special tokens that the model wrote."""


DEFAULT_MAX_TOKENS = 16
"""OpenAI's default on this endpoint."""


def to_request(body: CompletionBody) -> GenerateRequest:
    check_stream_options(body.stream, body.stream_options)
    n = body.n or 1
    if body.best_of not in (None, n):
        raise BadRequest(
            "`best_of` should equal `n`: ranking answers is not supported.", param="best_of"
        )
    most_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if most_tokens == 0 and not body.echo:
        raise BadRequest("`max_tokens: 0` needs `echo: true`.", param="max_tokens")
    prompts: tuple[Prompt, ...] = _prompts(body.prompt)
    if body.suffix is not None:
        prompts = tuple(_infill(prompt, body) for prompt in prompts)
    return GenerateRequest(
        model=body.model,
        **body.shared_fields(),
        buffered=not body.stream,
        progress=body.wants_progress,
        **body.constrained(),
        prompts=prompts,
        n=n,
        max_tokens=None if most_tokens < 0 else most_tokens,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        special_tokens=body.skip_special_tokens is False,
    )


def _prompts(
    prompt: str | list[int] | list[str] | list[list[int]],
) -> tuple[str | tuple[int, ...], ...]:
    """A list of token ids is one prompt; any other list is several prompts."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(item if isinstance(item, str) else tuple(item) for item in prompt)


def _infill(prompt: Prompt, body: CompletionBody) -> Infill:
    if body.echo:
        raise BadRequest("`echo` can't be used with `suffix`.", param="echo")
    if not isinstance(prompt, str):
        raise BadRequest("With a `suffix` the `prompt` should be a text.", param="prompt")
    return Infill(prompt, body.suffix or "")


class CompletionOutput(CompletionsOutput):
    PREFIX, BODY, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, model: str, prompts: int, n: int, reporting: Reporting = DEFAULT_REPORTING
    ) -> None:
        accumulator = Accumulator(
            model, prompts, n, keeps_logprobs=reporting.has_body, write_logprobs=_scored
        )
        super().__init__(accumulator, reporting)
        self._offsets = [0] * (prompts * n)
        """The offset in characters of the next token, for each answer."""

    def body(self) -> Wire:
        answers = zip(self._accumulator.answers, self._accumulator.logprobs, strict=True)
        choices = [
            self._choice(i, answer.text, logprobs, answer.finish_reason)
            for i, (answer, logprobs) in enumerate(answers)
        ]
        return self._whole(choices)

    def chunks(self, event: Event) -> Iterator[Wire]:
        self._accumulator.add(event)
        match event:
            case TextDelta(index, text, logprobs):
                yield self._chunk([self._choice(index, text, list(map(_scored, logprobs)), None)])
            case PromptProgress(index):
                yield {**self._chunk([self._choice(index, "", (), None)]), **self._progress(event)}
            case Finished(index, reason):
                choice = self._choice(index, "", (), reason)
                yield self._last_chunk([choice], self._accumulator.answers[index])

    def _choice(
        self, index: int, text: str, logprobs: Sequence["Scored"], reason: str | None
    ) -> Wire:
        reported = self._reported(index, logprobs) if self._reporting.logprobs else None
        return {"index": index, "text": text, "logprobs": reported, "finish_reason": reason}

    def _reported(self, index: int, logprobs: Sequence["Scored"]) -> Wire:
        tokens = [token for token, *_ in logprobs]
        *offsets, self._offsets[index] = accumulate(map(len, tokens), initial=self._offsets[index])
        tops = [top for *_, top in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [logprob for _, logprob, _ in logprobs],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }


Scored = tuple[str, float | None, msgspec.Raw | None]
"""A token, its log probability and JSON of the alternatives, which the first of a prompt lacks."""


def _scored(token: TokenLogprob) -> Scored:
    tops = {top.token: top.logprob for top in token.top}
    return token.token, token.logprob, msgspec.Raw(msgspec.json.encode(tops)) if tops else None


PATH = "/v1/completions"

router = keyed_router()
router.get(PATH + "/{id}/stream")(resumed)


@router.post(PATH, openapi_extra=documented(PATH, CompletionBody))
async def completions(http: Request) -> Response:
    body = await read(http, CompletionBody)
    request = to_request(body)
    reporting = body.reporting(request.logprobs)
    output = CompletionOutput(body.model, len(request.prompts), request.n, reporting)
    ignored = await in_thread_if_large(body.ignored)
    return await respond(http, request, output, ignored=ignored, overflow=prompt_too_long)
