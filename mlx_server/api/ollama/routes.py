"""Ollama's routes, and its lists of models. Those that would change the machine say which command
does it."""

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response

from mlx_server import __version__
from mlx_server.api.embeddings import checked as checked_inputs
from mlx_server.api.embeddings import embedded, vectors_response
from mlx_server.api.fields import ignored_header
from mlx_server.api.handlers import documented, json_response, read, respond, while_connected
from mlx_server.api.models import served
from mlx_server.api.ollama.answer import (
    OllamaOutput,
    Shape,
    chat_shape,
    embed_answer,
    generate_shape,
    loaded,
    older_embed_answer,
    rfc3339,
)
from mlx_server.api.ollama.input import (
    AnswerBody,
    EmbedBody,
    GenerateBody,
    OlderEmbedBody,
    OllamaChatBody,
    ShowBody,
    chat_request,
    generate_request,
    seconds_of,
)
from mlx_server.api.pool import check_not_pinned, check_runtime_models
from mlx_server.errors import BadRequest, ContextTooLong, Forbidden
from mlx_server.generation.embeddings import Embeddings, EmbedRequest
from mlx_server.http.errors import ollama_input_too_long, ollama_prompt_too_long
from mlx_server.http.security import keyed_router
from mlx_server.pool.models import ModelView
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import Capabilities
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest

CHAT, GENERATE, SHOW = "/api/chat", "/api/generate", "/api/show"
EMBED, EMBEDDINGS = "/api/embed", "/api/embeddings"

API_VERSION = "0.12.0"
"""The version of Ollama whose API this is. Clients compare it with the one they need."""

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
    ignored, seconds = await in_thread(body.ignored), body.keep_seconds
    name = own_name(pool, body.model)
    request = await in_thread(to_request, body, name)
    output = OllamaOutput(model=name, shape=shape, has_body=not body.streams)
    if seconds is not None and not _may_keep(http, name):
        ignored.append("keep_alive")
    response = await respond(
        http,
        request,
        output,
        stream=body.streams,
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
    ignored, seconds = await in_thread(body.ignored), body.keep_seconds
    name = own_name(pool, body.model)
    id, _ = await served(pool, name)
    if not body.unloads:
        await while_connected(http, pool.load(id, http.state.client))
    else:
        check_not_pinned(pool, id, "keep_alive")
    if seconds is not None:
        pool.keep(id, seconds)
    answer = loaded(name, shape, "unload" if body.unloads else "load")
    return json_response(answer, ignored_header(ignored))


def _may_keep(http: Request, name: str) -> bool:
    return http.app.state.runtime_models and not _is_pinned(http.app.state.pool, name)


def _is_pinned(pool: Pool, name: str) -> bool:
    return pool.models.spec(pool.models.split(name)[0]).pinned


@router.get("/api/tags")
async def tags(http: Request) -> Response:
    return json_response({"models": await listed(http.app.state.pool, http.app.state.started)})


@router.get("/api/ps")
async def ps(http: Request) -> Response:
    return json_response({"models": await running(http.app.state.pool)})


@router.post(SHOW, openapi_extra=documented(SHOW, ShowBody))
async def show(http: Request) -> Response:
    body = await read(http, ShowBody)
    if not (name := body.model or body.name):
        raise BadRequest("`model` is missing: it names the model to describe.", param="model")
    pool: Pool = http.app.state.pool
    id, _ = await served(pool, own_name(pool, name))
    description = await described(pool, id, http.app.state.started)
    return json_response(description, ignored_header(body.ignored()))


@router.get("/api/version")
async def version() -> Response:
    return json_response({"version": API_VERSION, "server": f"mlx-server {__version__}"})


@router.head("/api/version", include_in_schema=False)
@router.head("/api/tags", include_in_schema=False)
@router.head("/", include_in_schema=False)
@router.get("/")
async def is_running() -> Response:
    """Answers the request by which clients find out whether a server runs."""
    return Response("mlx-server is running", media_type="text/plain")


@router.post(EMBED, openapi_extra=documented(EMBED, EmbedBody))
async def embed(http: Request) -> Response:
    body = await read(http, EmbedBody)
    began = time.perf_counter()
    inputs = (body.input,) if isinstance(body.input, str) else tuple(body.input or ())
    result = await _embedded(http, body, inputs, body.truncate is not False, body.dimensions)
    answer = embed_answer(body.model, result, began)
    return vectors_response(result, answer, _unused(http, body))


@router.post(EMBEDDINGS, openapi_extra=documented(EMBEDDINGS, OlderEmbedBody))
async def embeddings(http: Request) -> Response:
    body = await read(http, OlderEmbedBody)
    inputs = (body.prompt,) if body.prompt else ()
    result = await _embedded(http, body, inputs, truncate=True)
    return json_response(older_embed_answer(result), _unused(http, body))


async def _embedded(
    http: Request,
    body: EmbedBody | OlderEmbedBody,
    inputs: tuple[str, ...],
    truncate: bool,
    dimensions: int | None = None,
) -> Embeddings | None:
    """None without inputs: such a request loads the model."""
    pool: Pool = http.app.state.pool
    seconds = None if body.keep_alive is None else seconds_of(body.keep_alive)
    name = own_name(pool, body.model)
    client = http.state.client
    result = None
    if inputs:
        texts = checked_inputs(inputs)
        request = EmbedRequest(name, texts, dimensions, truncate=truncate, client=client)
        try:
            result = await embedded(http, request)
        except ContextTooLong as error:
            raise ollama_input_too_long(error) from None
    else:
        check_runtime_models(http)
        id, _ = await served(pool, name)
        await while_connected(http, pool.load(id, client))
    if seconds is not None and http.app.state.runtime_models:
        pool.keep(pool.models.spec(name).id, seconds)
    return result


def _unused(http: Request, body: EmbedBody | OlderEmbedBody) -> dict[str, str]:
    pool: Pool = http.app.state.pool
    name = own_name(pool, body.model)
    is_unused = body.keep_alive is not None and not _may_keep(http, name)
    return ignored_header([*body.ignored(), *(["keep_alive"] if is_unused else [])])


@router.delete("/api/delete")
@router.post("/api/copy")
@router.post("/api/create")
@router.post("/api/push")
@router.post("/api/pull")
async def refuse(http: Request) -> Response:
    what = COMMANDS[http.url.path]
    raise Forbidden(f"No client may change the models of this server. Its owner can: {what}.")


Wire = dict[str, Any]

LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""

NEVER = "9999-12-31T23:59:59Z"
"""The expiry of a model that is only unloaded if memory is needed."""

ABILITIES = {"tools": "tools", "reasoning": "thinking", "fill_in_the_middle": "insert"}
"""Fields of `Capabilities`, and what Ollama calls them."""


def own_name(pool: Pool, name: str) -> str:
    """The name by which the pool knows the model, with its adapter."""
    is_tagged = name.endswith(LATEST) and name not in pool.models
    return name.removesuffix(LATEST) if is_tagged else name


async def listed(pool: Pool, started: float) -> list[Wire]:
    """Every model, and each with its adapters as `model:adapter`."""
    return [
        {**await _model(pool, view, name), "modified_at": rfc3339(started)}
        for view in pool.views()
        for name in (view.spec.id, *await _with_adapters(pool, view.spec.id))
    ]


async def running(pool: Pool) -> list[Wire]:
    views = (view for view in pool.views() if view.state == "ready")
    return [
        {
            **await _model(pool, view, view.spec.id),
            "expires_at": NEVER if view.stale_at is None else rfc3339(view.stale_at),
            "size_vram": view.nbytes,
            "context_length": pool.models[view.spec.id].context_length,
        }
        for view in views
    ]


async def described(pool: Pool, id: str, started: float) -> Wire:
    capabilities = await pool.capabilities(id)
    family = capabilities.family if capabilities else ""
    length = capabilities.context_length if capabilities else None
    context = {f"{family}.context_length": length} if length else {}
    inserts = capabilities and capabilities.fill_in_the_middle
    return {
        "modelfile": "",
        "parameters": "",
        # where Continue looks whether a model can insert text
        "template": "{{ .Prompt }}{{ .Suffix }}" if inserts else "",
        "modified_at": rfc3339(started),
        "details": _details(capabilities),
        "model_info": {"general.architecture": family, "general.basename": id, **context},
        "capabilities": _abilities(capabilities),
    }


async def _with_adapters(pool: Pool, id: str) -> list[str]:
    return [f"{id}:{adapter}" for adapter in await pool.adapter_names(id)]


async def _model(pool: Pool, view: ModelView, name: str) -> Wire:
    spec = view.spec
    entry = f"{name}\n{spec.source}\n{spec.revision}"
    return {
        "name": name,
        "model": name,
        "size": view.nbytes,
        # of the entry in models.yaml: clients only compare it
        "digest": hashlib.sha256(entry.encode()).hexdigest(),
        "details": _details(await pool.capabilities(spec.id)),
    }


def _details(capabilities: Capabilities | None) -> Wire:
    """Each is empty while the model's files are not on this machine."""
    family = capabilities.family if capabilities else ""
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": (capabilities and capabilities.quantization) or "",
    }


def _abilities(capabilities: Capabilities | None) -> list[str]:
    if capabilities and capabilities.task != "generate":
        return ["embedding"] if capabilities.task == "embed" else []
    fields = ABILITIES.items() if capabilities else ()
    return ["completion", *(name for field, name in fields if getattr(capabilities, field))]
