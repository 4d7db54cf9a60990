"""Ollama's routes as it documents them: their bodies, the requests that they make, and the answers.

Those that would change the machine say which command does it.
"""

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import starmap
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from pydantic import Field

from mlx_server import __version__, limits
from mlx_server.api import formats
from mlx_server.api.accumulator import Accumulator, Wire, arguments_object, logprob_json
from mlx_server.api.chat_completions.input import FunctionCallParam
from mlx_server.api.content import Content, of_data, parts_of
from mlx_server.api.embeddings import Dimensions, embedded, numbers, vectors_response
from mlx_server.api.embeddings import checked as checked_inputs
from mlx_server.api.fields import (
    EMPTY_IS_UNSET,
    ROLES,
    SOME_EFFORT,
    UNKNOWN_ROLE,
    WHOLE,
    DescribedFunction,
    Items,
    RoleName,
    SamplingBody,
    SharedFields,
    Text,
    WireModel,
    ignored_header,
    role_of,
    the_only,
)
from mlx_server.api.formats import FormatChoice
from mlx_server.api.handlers import documented, json_response, read, respond, while_connected
from mlx_server.api.histories import MENDED, with_answered_calls
from mlx_server.api.models import served
from mlx_server.api.pool import check_not_pinned, check_runtime_models
from mlx_server.errors import BadRequest, ContextTooLong, Forbidden
from mlx_server.events import Event, Finished, ReasoningDelta, TextDelta, ToolCallFinished
from mlx_server.generation.embeddings import Embeddings, EmbedRequest
from mlx_server.http.errors import ollama_error, ollama_prompt_too_long
from mlx_server.http.security import keyed_router
from mlx_server.http.sse import Frames, StreamedOutput
from mlx_server.messages import (
    ContentPart,
    Conversation,
    Message,
    ToolCall,
    content_of,
    media_parts,
)
from mlx_server.pool.models import ModelView
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import Capabilities
from mlx_server.request_threads import in_thread, in_thread_if_large
from mlx_server.requests import GenerateRequest, Infill, JsonFormat, Prompt, SamplingChoices

PARAM = "keep_alive"
MOST_CHARACTERS = 40
MOST_SECONDS = 1e9

SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h)")
NUMBER = re.compile(r"-?[0-9]+\.?[0-9]*")

KeepAlive = int | float | str


def seconds_of(sent: KeepAlive) -> float:
    """Infinite for a negative duration, which means that the model stays until memory is needed."""
    # a whole number may be too large for a float
    seconds = _parsed(sent) if isinstance(sent, str) else max(-1, min(sent, 2 * MOST_SECONDS))
    return math.inf if seconds < 0 or seconds > MOST_SECONDS else seconds


def _parsed(text: str) -> float:
    if len(text) <= MOST_CHARACTERS:
        if NUMBER.fullmatch(text):
            return float(text)
        duration = text.removeprefix("-")
        if duration and not PART.sub("", duration):
            parts = PART.findall(duration)
            total = sum(float(number) * SECONDS[unit] for number, unit in parts)
            return -total if text.startswith("-") else total
    raise BadRequest(
        f"`{PARAM}` should be a number of seconds or a duration such as 5m or 1h30m; it is "
        f"{text[:MOST_CHARACTERS]!r}.",
        param=PARAM,
    )


Name = Annotated[str, Field(min_length=1)]
Think = bool | Literal["low", "medium", "high", "max"]
Format = Literal["", "json"] | dict[str, Any]
Images = Items[str]


class Options(SamplingBody):
    """Ollama's names of the sampling parameters, besides those of the other endpoints."""

    num_predict: Annotated[int, Field(ge=-2, lt=2**53), WHOLE] | None = None
    """A value that is not positive stands for as many tokens as fit the context."""
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None

    def choices(self) -> SamplingChoices:
        choices = super().choices()
        names = ("repeat_penalty", "repetition_penalty")
        penalties = {f"options.{name}": value for name in names if (value := getattr(self, name))}
        if penalty := the_only(penalties, "are two names of one parameter"):
            choices["repetition_penalty"] = penalty
        return choices

    def shared_fields(self) -> SharedFields:
        """A negative seed asks for a random one."""
        seed = None if self.seed is None or self.seed < 0 else self.seed
        return {**super().shared_fields(), "seed": seed}

    @property
    def most_tokens(self) -> int | None:
        return self.num_predict if self.num_predict and self.num_predict > 0 else None


class OllamaBody(WireModel):
    model: Name
    keep_alive: KeepAlive | None = None

    @property
    def keep_seconds(self) -> float | None:
        """The seconds for which the model is kept; None leaves that to models.yaml."""
        return None if self.keep_alive is None else seconds_of(self.keep_alive)


class AnswerBody(OllamaBody):
    """The fields that `/api/chat` and `/api/generate` share."""

    stream: bool | None = None
    """Unlike elsewhere, an answer is streamed by default."""
    format: Format | None = None
    options: Options | None = None
    think: Annotated[Think | None, EMPTY_IS_UNSET] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.TOP_LOGPROBS), WHOLE] | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def unloads(self) -> bool:
        return self.keep_seconds is not None and math.isclose(self.keep_seconds, 0)


READ_BY_ROLE = {"assistant": ("thinking", "tool_calls"), "tool": ("tool_name", "tool_call_id")}
"""The fields of a message that have an effect, besides its content."""


class OllamaMessageParam(WireModel):
    role: RoleName = UNKNOWN_ROLE
    content: Content | None = None
    thinking: Text = None
    images: Images | None = None
    tool_calls: Items[FunctionCallParam] | None = None
    tool_name: Text = None
    tool_call_id: Text = None

    def unused(self) -> Iterable[str]:
        if self.role not in ROLES:
            yield "role"
        used = READ_BY_ROLE.get(role_of(self.role), ())
        for name in ("thinking", "tool_calls", "tool_name", "tool_call_id"):
            if name not in used and getattr(self, name):
                yield name


class ToolParam(WireModel):
    type: Literal["function"] | None = None
    function: DescribedFunction


class OllamaChatBody(AnswerBody):
    messages: Annotated[Items[OllamaMessageParam], MENDED] | None = None
    """Without any, the model is loaded, or unloaded if `keep_alive` is 0."""
    tools: Annotated[Items[ToolParam], Field(max_length=limits.TOOLS)] | None = None


class GenerateBody(AnswerBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "template": "the model's owner sets it in models.yaml"
    }

    prompt: str | None = None
    """Without one, the model is loaded, or unloaded if `keep_alive` is 0."""
    system: str | None = None
    raw: bool | None = None
    """Whether the prompt is continued as it is, and not answered as a message."""
    suffix: Annotated[str | None, EMPTY_IS_UNSET] = None
    """The text after the answer, which then is what is missing between the prompt and it."""
    images: Images | None = None

    def unused(self) -> Iterable[str]:
        without = ("system",) if self.suffix else ()
        for name in ("think", "images", *without) if self.raw or self.suffix else ():
            if getattr(self, name) is not None:
                yield name


class ShowBody(WireModel):
    model: Name | None = None
    name: Name | None = None
    """The older name of `model`."""


class VectorsBody(OllamaBody):
    """The options that have an effect on an embedding are none."""

    options: dict[str, Any] | None = None

    def unused(self) -> Iterable[str]:
        yield from (f"options.{name}" for name in self.options or {})


class EmbedBody(VectorsBody):
    """`/api/embed`."""

    input: str | Items[str] | None = None
    truncate: bool | None = None
    """Whether inputs that are too long are cut, which they are by default."""
    dimensions: Dimensions | None = None


class OlderEmbedBody(VectorsBody):
    """`/api/embeddings`, which takes one text."""

    prompt: str | None = None


EFFORTS: Mapping[bool | str, str] = {True: SOME_EFFORT, False: "none", "max": "xhigh"}
"""Ollama's words for an effort that the families know by another one."""


def chat_request(body: OllamaChatBody, model: str) -> GenerateRequest:
    conversation = Conversation(
        messages=tuple(with_answered_calls(_messages(body.messages or ()))),
        tools=tuple(tool.function.tool() for tool in body.tools or ()),
        **_rendering(body),
    )
    return _request(body, model, conversation)


def generate_request(body: GenerateBody, model: str) -> GenerateRequest:
    if body.suffix:
        return _request(body, model, Infill(body.prompt or "", body.suffix))
    if body.raw:
        if body.system:
            raise BadRequest(
                "`raw` takes the prompt as it is: put the system prompt into it, or leave out "
                "`system`.",
                param="system",
            )
        return _request(body, model, body.prompt or "")
    system = [Message("system", body.system)] if body.system else []
    parts = [*_images(body.images, "images"), *filter(None, (body.prompt,))]
    user = Message("user", content_of(parts), parts=media_parts(parts))
    conversation = Conversation(messages=(*system, user), **_rendering(body))
    return _request(body, model, conversation)


def _request(body: AnswerBody, model: str, prompt: Prompt) -> GenerateRequest:
    options = body.options or Options()
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    return GenerateRequest(
        model=model,
        **options.shared_fields(),
        **_format(body),
        buffered=not body.streams,
        prompts=(prompt,),
        max_tokens=options.most_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        param_names={"chat_template_kwargs.reasoning_effort": "think"},
    )


def _rendering(body: AnswerBody) -> dict[str, Any]:
    effort = None if body.think is None else EFFORTS.get(body.think, body.think)
    return {
        "template_kwargs": {} if effort is None else {"reasoning_effort": effort},
        "response_format": formats.prompt_description(_format(body)["format"]),
    }


def _format(body: AnswerBody) -> FormatChoice:
    match body.format:
        case "json":
            return {"format": JsonFormat(), "format_param": "format"}
        case dict(schema):
            return {"format": JsonFormat(schema, strict=False), "format_param": "format"}
    return {"format": None, "format_param": "format"}


def _messages(params: Sequence[OllamaMessageParam]) -> Iterator[Message]:
    for i, message in enumerate(params):
        role = role_of(message.role)
        images = _images(message.images, "messages.images")
        parts = [*images, *parts_of(message.content, f"messages[{i}].content")]
        yield Message(
            role,
            content_of(parts),
            name=message.tool_name if role == "tool" else None,
            reasoning=message.thinking or None,
            tool_calls=tuple(_calls(message.tool_calls or (), i)),
            tool_call_id=message.tool_call_id if role == "tool" else None,
            parts=media_parts(parts),
        )


def _calls(params: Sequence[FunctionCallParam], place: int) -> Iterator[ToolCall]:
    for number, param in enumerate(params):
        call = param.call()
        id, arguments = call.id or f"call_{place}_{number}", call.arguments or "{}"
        yield replace(call, id=id, arguments=arguments)


def _images(images: Sequence[str] | None, place: str) -> Iterator[ContentPart]:
    return (of_data("image", image, "", place) for image in images or ())


class Shape(Protocol):
    """A part of an answer, or all of it, as one of the endpoints has it."""

    def __call__(self, text: str = "", thinking: str = "", calls: Sequence[Wire] = ()) -> Wire: ...


def chat_shape(text: str = "", thinking: str = "", calls: Sequence[Wire] = ()) -> Wire:
    optional = {"thinking": thinking, "tool_calls": calls}
    present = {name: value for name, value in optional.items() if value}
    return {"message": {"role": "assistant", "content": text, **present}}


def generate_shape(text: str = "", thinking: str = "", calls: Sequence[Wire] = ()) -> Wire:
    return {"response": text, **({"thinking": thinking} if thinking else {})}


class OllamaOutput(StreamedOutput):
    def __init__(self, *, model: str, shape: Shape, has_body: bool = True) -> None:
        """has_body: whether a body is needed, which has all log probabilities."""
        self._accumulator = Accumulator(model=model, prompts=1, n=1, keeps_logprobs=has_body)
        self._latest: Wire = {}
        self._shape = shape

    def add(self, event: Event) -> None:
        for chunk in self.chunks(event):
            self._latest = chunk

    def body(self) -> Wire:
        (answer,), (logprobs,) = self._accumulator.answers, self._accumulator.logprobs
        calls = list(starmap(_called, enumerate(answer.calls)))
        whole = self._shape(answer.text, answer.thoughts, calls)
        return {**self._latest, **whole, **_logprobs(logprobs)}

    def chunks(self, event: Event) -> Iterator[Wire]:
        self._accumulator.add(event)
        match event:
            case TextDelta(_, _, logprobs):
                scored = _logprobs(list(map(logprob_json, logprobs)))
                yield {**self._chunk(event.separated), **scored}
            case ReasoningDelta():
                yield self._chunk(thinking=event.separated)
            case ToolCallFinished():
                (answer,) = self._accumulator.answers
                last = len(answer.calls) - 1
                yield self._chunk(calls=[_called(last, answer.calls[last])])
            case Finished():
                yield self._last(event)

    def frames(self) -> Frames:
        """Lines of JSON. A client parses each line, so what keeps a stream alive is a chunk too."""
        return Frames(
            keep_alive=lambda: line(self._chunk()),
            end=b"",
            error=ollama_error,
            encode=line,
            media_type="application/x-ndjson",
        )

    def _last(self, event: Finished) -> Wire:
        (answer,) = self._accumulator.answers
        tokens = event.counts.completion_tokens
        return {
            **self._chunk(),
            "done": True,
            "done_reason": "length" if event.reason == "length" else "stop",
            **self._accumulator.timing.durations(self._accumulator.prompt_tokens, tokens),
            **self._accumulator.warnings(answer),
        }

    def _chunk(self, text: str = "", thinking: str = "", calls: Sequence[Wire] = ()) -> Wire:
        return chunk(self._accumulator.model, self._shape(text, thinking, calls))


def chunk(model: str, content: Wire) -> Wire:
    return {"model": model, "created_at": rfc3339(time.time()), **content, "done": False}


def rfc3339(seconds: float) -> str:
    """With a fraction, which some clients' readers of dates want."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z")


def line(data: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(data) + b"\n"


def _called(index: int, call: ToolCall) -> Wire:
    arguments = arguments_object(call.arguments)
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def _logprobs(tokens: Sequence[msgspec.Raw]) -> Wire:
    return {"logprobs": tokens} if tokens else {}


CHAT, GENERATE, SHOW = "/api/chat", "/api/generate", "/api/show"
EMBED, EMBEDDINGS = "/api/embed", "/api/embeddings"

API_VERSION = "0.30.11"
"""The version of Ollama whose API this is. Clients compare it with the one they need: Codex wants
Responses, since 0.13.4."""

COMMANDS: Mapping[str, str] = {
    "/api/pull": "`mlx-server pull NAME` fetches a model, and models.yaml lists it",
    "/api/push": "`hf upload` publishes a model's folder",
    "/api/create": "an entry under `models` in models.yaml makes a model with its own settings",
    "/api/copy": "`aliases` in models.yaml give a model further names",
    "/api/delete": "remove the model from models.yaml, and its files with `hf cache`",
}
"""The command that replaces a refused route, by the route."""

Body = TypeVar("Body", bound=AnswerBody)

router = keyed_router()


@router.post(CHAT, openapi_extra=documented(CHAT, OllamaChatBody))
async def chat(http: Request) -> Response:
    body = await read(http, OllamaChatBody)
    if not body.messages:
        return await _load(http, body, chat_shape)
    return await _answer(http, body, chat_request, chat_shape)


@router.post(GENERATE, openapi_extra=documented(GENERATE, GenerateBody))
async def generate(http: Request) -> Response:
    body = await read(http, GenerateBody)
    if not body.prompt and not body.suffix:
        return await _load(http, body, generate_shape)
    return await _answer(http, body, generate_request, generate_shape)


async def _answer(
    http: Request, body: Body, to_request: Callable[[Body, str], GenerateRequest], shape: Shape
) -> Response:
    pool: Pool = http.app.state.pool
    ignored, seconds = await in_thread_if_large(body.ignored), body.keep_seconds
    name = own_name(pool, body.model)
    request = await in_thread(to_request, body, name)
    output = OllamaOutput(model=name, shape=shape, has_body=not body.streams)
    if seconds is not None and not _may_keep(http, name):
        ignored.append("keep_alive")
    response = await respond(
        http,
        request,
        output,
        ignored=ignored,
        frames=output.frames(),
        overflow=ollama_prompt_too_long,
    )
    if seconds is not None and http.app.state.runtime_models:
        pool.keep(pool.models.spec(pool.models.split(name)[0]).id, seconds)
    return response


async def _load(http: Request, body: AnswerBody, shape: Shape) -> Response:
    """Answers a request without a prompt, which loads the model, or unloads it."""
    pool: Pool = http.app.state.pool
    check_runtime_models(http)
    ignored, seconds = await in_thread_if_large(body.ignored), body.keep_seconds
    name = own_name(pool, body.model)
    id, _ = await served(pool, name)
    if not body.unloads:
        await while_connected(http, pool.load(id, http.state.client))
    else:
        check_not_pinned(pool, id, "keep_alive")
    if seconds is not None:
        pool.keep(id, seconds)
    reason = "unload" if body.unloads else "load"
    answer = {**chunk(name, shape()), "done": True, "done_reason": reason}
    return json_response(answer, ignored_header(ignored))


def _may_keep(http: Request, name: str) -> bool:
    pool: Pool = http.app.state.pool
    spec = pool.models.spec(pool.models.split(name)[0])
    return http.app.state.runtime_models and not spec.pinned


@router.get("/api/tags")
async def tags(http: Request) -> Response:
    """Every model, and each with its adapters as `model:adapter`."""
    pool: Pool = http.app.state.pool
    modified = {"modified_at": rfc3339(http.app.state.started)}
    models = [
        {**await _model(pool, view, f"{view.spec.id}{adapter}"), **modified}
        for view in pool.views()
        for adapter in ("", *(f":{name}" for name in await pool.adapter_names(view.spec.id)))
    ]
    return json_response({"models": models})


@router.get("/api/ps")
async def ps(http: Request) -> Response:
    pool: Pool = http.app.state.pool
    models = [
        {
            **await _model(pool, view, view.spec.id),
            "expires_at": NEVER if view.stale_at is None else rfc3339(view.stale_at),
            "size_vram": view.nbytes,
            "context_length": pool.models[view.spec.id].context_length,
        }
        for view in pool.views()
        if view.state == "ready"
    ]
    return json_response({"models": models})


@router.post(SHOW, openapi_extra=documented(SHOW, ShowBody))
async def show(http: Request) -> Response:
    body = await read(http, ShowBody)
    if not (name := body.model or body.name):
        raise BadRequest("`model` is missing: it names the model to describe.", param="model")
    pool: Pool = http.app.state.pool
    id, _ = await served(pool, own_name(pool, name))
    capabilities = await pool.capabilities(id)
    variables = (name for field, name in VARIABLES.items() if getattr(capabilities, field, False))
    details = _details(capabilities)
    family, length = details["family"], details.get("context_length")
    context = {f"{family}.context_length": length} if length else {}
    description = {
        "modelfile": "",
        "parameters": "",
        "template": "".join(f"{{{{ .{name} }}}}" for name in ("Prompt", *variables)),
        "modified_at": rfc3339(http.app.state.started),
        "details": details,
        "model_info": {"general.architecture": family, "general.basename": id, **context},
        "capabilities": _abilities(capabilities),
    }
    return json_response(description, ignored_header(body.ignored()))


@router.get("/api/version")
async def version() -> Response:
    return json_response({"version": API_VERSION, "server": f"mlx-server {__version__}"})


@router.get("/")
async def is_running() -> Response:
    """Answers the request by which clients find out whether a server runs."""
    return Response("mlx-server is running", media_type="text/plain")


@router.post(EMBED, openapi_extra=documented(EMBED, EmbedBody))
async def embed(http: Request) -> Response:
    body = await read(http, EmbedBody)
    began = time.perf_counter()
    inputs = (body.input,) if isinstance(body.input, str) else tuple(body.input or ())
    truncates = body.truncate is not False
    result, headers = await _embedded(http, body, inputs, truncates, body.dimensions)
    answer = {
        "model": body.model,
        "embeddings": map(numbers, result.vectors if result else ()),
        "total_duration": int((time.perf_counter() - began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": result.tokens if result else 0,
    }
    return vectors_response(result, answer, headers)


@router.post(EMBEDDINGS, openapi_extra=documented(EMBEDDINGS, OlderEmbedBody))
async def embeddings(http: Request) -> Response:
    body = await read(http, OlderEmbedBody)
    inputs = (body.prompt,) if body.prompt else ()
    result, headers = await _embedded(http, body, inputs, truncate=True)
    return json_response({"embedding": numbers(result.vectors[0]) if result else []}, headers)


async def _embedded(
    http: Request,
    body: VectorsBody,
    inputs: tuple[str, ...],
    truncate: bool,
    dimensions: int | None = None,
) -> tuple[Embeddings | None, dict[str, str]]:
    """The embeddings, which are None without inputs since such a request loads the model; and the
    header with what is ignored."""
    pool: Pool = http.app.state.pool
    seconds, client = body.keep_seconds, http.state.client
    name = own_name(pool, body.model)
    result = None
    if inputs:
        texts = checked_inputs(inputs)
        request = EmbedRequest(name, texts, dimensions, truncate=truncate, client=client)
        try:
            result = await embedded(http, request)
        except ContextTooLong as error:
            said = f"the input length exceeds the context length. {error.message}"
            raise ContextTooLong(said, param=error.param) from None
    else:
        check_runtime_models(http)
        id, _ = await served(pool, name)
        await while_connected(http, pool.load(id, client))
    if seconds is not None and http.app.state.runtime_models:
        pool.keep(pool.models.spec(name).id, seconds)
    unkept = ["keep_alive"] if seconds is not None and not _may_keep(http, name) else []
    return result, ignored_header([*body.ignored(), *unkept])


@router.delete("/api/delete")
@router.post("/api/copy")
@router.post("/api/create")
@router.post("/api/push")
@router.post("/api/pull")
async def refuse(http: Request) -> Response:
    what = COMMANDS[http.url.path]
    raise Forbidden(f"No client may change the models of this server. Its owner can: {what}.")


LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""

NEVER = "9999-12-31T23:59:59.000000Z"
"""The expiry of a model that is only unloaded if memory is needed."""

ABILITIES = {
    "tools": "tools",
    "reasoning": "thinking",
    "fill_in_the_middle": "insert",
    "sees": "vision",
}
"""Fields of `Capabilities`, and what Ollama calls them."""

VARIABLES = {"tools": "Tools", "fill_in_the_middle": "Suffix"}
"""Fields of `Capabilities`, and the variables of a template by which LiteLLM and Continue know."""


def own_name(pool: Pool, name: str) -> str:
    """The name by which the pool knows the model, with its adapter."""
    is_tagged = name.endswith(LATEST) and name not in pool.models
    return name.removesuffix(LATEST) if is_tagged else name


async def _model(pool: Pool, view: ModelView, name: str) -> Wire:
    spec = view.spec
    entry = f"{name}\n{spec.source}\n{spec.revision}"
    capabilities = await pool.capabilities(spec.id)
    return {
        "name": name,
        "model": name,
        "size": view.nbytes,
        # of the entry in models.yaml: clients only compare it
        "digest": hashlib.sha256(entry.encode()).hexdigest(),
        "details": _details(capabilities),
        "capabilities": _abilities(capabilities),
    }


def _details(capabilities: Capabilities | None) -> Wire:
    """Each is empty while the model's files are not on this machine."""
    family = capabilities.family if capabilities else ""
    length = capabilities.context_length if capabilities else None
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": (capabilities and capabilities.quantization) or "",
        **({"context_length": length} if length else {}),
    }


def _abilities(capabilities: Capabilities | None) -> list[str]:
    if capabilities and capabilities.task != "generate":
        return ["embedding"] if capabilities.task == "embed" else []
    fields = ABILITIES.items() if capabilities else ()
    return ["completion", *(name for field, name in fields if getattr(capabilities, field))]
