"""`POST /v1/completions` on the wire, as OpenAI documents it."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api.accumulator import Accumulator, prompt_logprobs_body, prompt_progress
from mlx_server.api.fields import WHOLE, GenerationBody, Items, check_stream_options
from mlx_server.api.formats import ConstrainedBody
from mlx_server.api.handlers import documented, read, respond
from mlx_server.errors import BadRequest
from mlx_server.events import Event, Finished, PromptProgress, TextDelta, TokenLogprob
from mlx_server.http.errors import prompt_too_long
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
Texts = Annotated[Items[str], Field(min_length=1, max_length=limits.PROMPTS)]
TokenLists = Annotated[Items[TokenIds], Field(min_length=1, max_length=limits.PROMPTS)]


class CompletionBody(ConstrainedBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **GenerationBody.UNSUPPORTED,
        "suffix": "these models can't insert text before a suffix",
    }

    prompt: str | TokenIds | Texts | TokenLists
    max_tokens: Annotated[int, Field(ge=-1), WHOLE] | None = None
    """-1 stands for as many tokens as fit the context."""
    logprobs: Annotated[int, Field(ge=0, le=limits.TOP_LOGPROBS), WHOLE] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1), WHOLE] | None = None
    skip_special_tokens: bool | None = None
    """vLLM's: if false, the text has the special tokens that the model wrote."""


DEFAULT_MAX_TOKENS = 16
"""OpenAI's default on this endpoint."""


def to_request(body: CompletionBody) -> GenerateRequest:
    check_stream_options(body.stream, body.stream_options)
    body.refuse_streamed_prompts()
    n = body.n or 1
    if body.best_of not in (None, n):
        raise BadRequest(
            "`best_of` should equal `n`: ranking answers is not supported.", param="best_of"
        )
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("`max_tokens: 0` needs `echo: true`.", param="max_tokens")
    return GenerateRequest(
        model=body.model,
        **body.shared_fields(),
        include_raw=body.include_raw,
        **body.constrained(),
        buffered=not body.stream,
        progress=body.include_progress,
        continuous_usage=body.counts_tokens,
        token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs,
        prompts=_prompts(body.prompt),
        n=n,
        max_tokens=_most_tokens(body.max_tokens),
        logprobs=body.logprobs,
        echo=bool(body.echo),
        special_tokens=body.skip_special_tokens is False,
    )


def _most_tokens(given: int | None) -> int | None:
    if given is None:
        return DEFAULT_MAX_TOKENS
    return None if given < 0 else given


def _prompts(
    prompt: str | list[int] | list[str] | list[list[int]],
) -> tuple[str | tuple[int, ...], ...]:
    """A list of token ids is one prompt; any other list is several prompts."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(item if isinstance(item, str) else tuple(item) for item in prompt)


Wire = dict[str, Any]


class CompletionOutput:
    def __init__(
        self,
        *,
        model: str,
        prompts: int,
        n: int,
        logprobs: bool,
        include_usage: bool,
        continuous_usage: bool = False,
        token_ids: bool = False,
        timings: bool = False,
        has_body: bool = True,
    ) -> None:
        """has_body: whether a body is needed, which has all log probabilities."""
        self._accumulator = Accumulator(
            model=model, prompts=prompts, n=n, keeps_logprobs=has_body, write_logprobs=_scored
        )
        self._offsets = [0] * (prompts * n)
        """The offset in characters of the next token, for each answer."""
        self._is_begun = [False] * (prompts * n)
        """Whether a chunk has been sent, for each answer."""
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._token_ids = token_ids
        self._timings = timings
        self._n = n
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._began = time.monotonic()
        self._created = int(time.time())

    def add(self, event: Event) -> None:
        self._accumulator.add(event)

    def body(self) -> Wire:
        choices = [
            {
                **self._choice(i, answer.text, self._accumulator.logprobs[i], answer.finish_reason),
                **prompt_logprobs_body(self._accumulator.answers[i - i % self._n]),
                **self._ids(i, answer.token_ids, begins=True),
            }
            for i, answer in enumerate(self._accumulator.answers)
        ]
        usage = self._accumulator.usage()
        warnings = self._accumulator.warnings(*self._accumulator.answers)
        return {**self._head(), "choices": choices, "usage": usage, **self._timed(), **warnings}

    def chunks(self, event: Event) -> Iterator[Wire]:
        self._accumulator.add(event)
        match event:
            case TextDelta(index, text, logprobs):
                scored = list(map(_scored, logprobs))
                yield self._chunk(self._choice(index, text, scored, None))
            case PromptProgress(index):
                progress = prompt_progress(event, time.monotonic() - self._began)
                yield {**self._chunk(self._choice(index, "", (), None)), **progress}
            case Finished(index, reason):
                warnings = self._accumulator.warnings(self._accumulator.answers[index])
                yield {**self._chunk(self._choice(index, "", (), reason)), **warnings}

    def end(self) -> Iterator[Wire]:
        if self._include_usage:
            usage = self._accumulator.usage()
            yield {**self._head(), "choices": [], "usage": usage, **self._timed()}

    def _head(self) -> Wire:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._accumulator.model,
            **self._accumulator.fingerprint_fields(),
        }

    def _chunk(self, choice: Wire) -> Wire:
        index = choice["index"]
        begins, self._is_begun[index] = not self._is_begun[index], True
        ids = self._ids(index, self._accumulator.new_token_ids(index), begins=begins)
        choices = [{**choice, **ids}]
        return {**self._head(), "choices": choices, **self._usage(), **self._timed()}

    def _ids(self, index: int, ids: Sequence[int], *, begins: bool) -> Wire:
        """The answer's next tokens, after those of its prompt if it begins with them."""
        if not self._token_ids:
            return {}
        prompt = self._accumulator.prompt_token_ids[index // self._n]
        return {**({"prompt_token_ids": list(prompt)} if begins else {}), "token_ids": list(ids)}

    def _timed(self) -> Wire:
        return self._accumulator.timings() if self._timings else {}

    def _usage(self) -> Wire:
        """A chunk's `usage`: null, unless the client wants the usage so far with each chunk."""
        if not self._include_usage:
            return {}
        return {"usage": self._accumulator.usage() if self._continuous_usage else None}

    def _choice(
        self, index: int, text: str, logprobs: Sequence["Scored"], reason: str | None
    ) -> Wire:
        reported = self._reported(index, logprobs) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": reported, "finish_reason": reason}

    def _reported(self, index: int, logprobs: Sequence["Scored"]) -> Wire:
        offsets = []
        for token, *_ in logprobs:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        tops = [top for *_, top in logprobs]
        return {
            "tokens": [token for token, *_ in logprobs],
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

router = APIRouter()


@router.post(PATH, openapi_extra=documented(PATH, CompletionBody))
async def completions(http: Request) -> Response:
    body = await read(http, CompletionBody)
    request = to_request(body)
    output = CompletionOutput(
        model=body.model,
        prompts=len(request.prompts),
        n=request.n,
        logprobs=request.logprobs is not None,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        token_ids=bool(body.return_token_ids),
        timings=bool(body.timings_per_token),
        has_body=not body.stream,
    )
    ignored = await in_thread(body.ignored)
    return await respond(
        http,
        request,
        output,
        stream=bool(body.stream),
        ignored=ignored,
        overflow=prompt_too_long,
    )
