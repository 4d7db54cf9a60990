"""Fill in the middle on the wire: llama.cpp's `POST /infill` and Mistral's `/v1/fim/completions`.
`/v1/completions` takes a `suffix` as OpenAI's did."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api.accumulator import Accumulator, Wire
from mlx_server.api.chat_completions.answer import ChatOutput
from mlx_server.api.completions import CompletionBody
from mlx_server.api.completions import to_request as completion_request
from mlx_server.api.fields import WHOLE, Items, SamplingBody, WireModel
from mlx_server.api.handlers import documented, read, respond, while_connected
from mlx_server.api.models import model_or_default
from mlx_server.errors import BadRequest
from mlx_server.events import Event, Finished, TextDelta
from mlx_server.http.errors import prompt_too_long
from mlx_server.http.security import keyed_router
from mlx_server.http.sse import Frames, StreamedOutput
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread_if_large
from mlx_server.requests import ContextFile, GenerateRequest, Infill


class ExtraParam(WireModel):
    filename: str | None = None
    text: str


class InfillBody(SamplingBody):
    ACCEPTED = SamplingBody.ACCEPTED | {"cache_prompt"}

    model: Annotated[str, Field(min_length=1)] | None = None
    """The first model that can insert text by default."""
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[Items[ExtraParam], Field(max_length=limits.INFILL_FILES)] | None = None
    prompt: str | None = None
    """The end of the prefix: editors send the line of the cursor apart."""
    n_predict: Annotated[int, Field(ge=-1), WHOLE] | None = None
    """0 only computes the prompt, so that the next request finds it in the prompt cache."""
    n_cmpl: Annotated[int, Field(ge=1, le=limits.ANSWERS), WHOLE] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stream: bool | None = None


def to_request(body: InfillBody, model: str) -> GenerateRequest:
    files = (ContextFile(extra.filename or "tmp", extra.text) for extra in body.input_extra or ())
    shared = body.shared_fields()
    if body.repeat_penalty is not None:
        shared["choices"]["repetition_penalty"] = body.repeat_penalty
    if (body.seed or 0) < 0:
        shared["seed"] = None
    most = body.n_predict
    return GenerateRequest(
        model=model,
        **shared,
        prompts=(Infill(body.input_prefix + (body.prompt or ""), body.input_suffix, (*files,)),),
        n=body.n_cmpl or 1,
        buffered=not body.stream,
        max_tokens=None if most is None or most < 0 else max(1, most),
    )


class InfillOutput(StreamedOutput):
    """llama.cpp's own form of a completion."""

    def __init__(self, body: InfillBody, model: str) -> None:
        self._accumulator = Accumulator(model, 1, body.n_cmpl or 1)
        self._only_prompt = body.n_predict == 0

    def add(self, event: Event) -> None:
        self._accumulator.add(event)

    def body(self) -> Any:
        """A list, if there are several answers."""
        bodies = [
            {**self._last(i), "content": "" if self._only_prompt else answer.text}
            for i, answer in enumerate(self._accumulator.answers)
        ]
        return bodies if len(bodies) > 1 else bodies[0]

    def chunks(self, event: Event) -> Iterator[Wire]:
        self.add(event)
        match event:
            case TextDelta(index, text) if not self._only_prompt:
                yield {"index": index, "content": text, "tokens": [], "stop": False}
            case Finished(index):
                yield self._last(index)

    def _last(self, index: int) -> Wire:
        answer = self._accumulator.answers[index]
        counts, stopped_by = answer.counts, answer.finished and answer.finished.stop_string
        end = "limit" if answer.finish_reason == "length" else "word" if stopped_by else "eos"
        return {
            "index": index,
            "content": "",
            "tokens": [],
            "stop": True,
            "model": self._accumulator.model,
            "tokens_predicted": counts.completion_tokens,
            "tokens_evaluated": self._accumulator.prompt_tokens,
            "tokens_cached": counts.cached_tokens,
            "truncated": False,
            "stop_type": end,
            "stopping_word": stopped_by or "",
            **self._accumulator.timings(),
            **self._accumulator.warnings(answer),
        }


INFILL, FIM = "/infill", "/v1/fim/completions"

router = keyed_router()


@router.post(INFILL, openapi_extra=documented(INFILL, InfillBody))
async def infill(http: Request) -> Response:
    body = await read(http, InfillBody)
    ignored = await in_thread_if_large(body.ignored)
    pool: Pool = http.app.state.pool
    model = await while_connected(http, _model(pool, body.model))
    request = await in_thread_if_large(to_request, body, model)
    return await respond(
        http,
        request,
        InfillOutput(body, model),
        ignored=ignored,
        frames=Frames(end=b""),
        overflow=prompt_too_long,
    )


async def _model(pool: Pool, requested: str | None) -> str:
    if requested:
        return requested
    for spec in pool.models.specs:
        capabilities = await pool.capabilities(spec.id)
        if capabilities and capabilities.fill_in_the_middle and not spec.upstream:
            return spec.id
    return await model_or_default(pool, None)


class FimBody(CompletionBody):
    random_seed: Annotated[int, Field(ge=0, lt=2**63), WHOLE] | None = None


@router.post(FIM, openapi_extra=documented(FIM, FimBody))
async def fim_completions(http: Request) -> Response:
    body = await read(http, FimBody)
    ignored = await in_thread_if_large(body.ignored)
    request = completion_request(body)
    if body.max_tokens is None:
        request = replace(request, max_tokens=None)
    if len(request.prompts) > 1:
        raise BadRequest("`prompt` should be one text.", param="prompt")
    if body.seed is None:
        request = replace(request, seed=body.random_seed)
    reporting = body.reporting(request.logprobs)
    output = ChatOutput(body.model, request.n, reporting, reasoning_fields=())
    return await respond(http, request, output, ignored=ignored, overflow=prompt_too_long)
