"""`GET /v1/models` and `GET /v1/models/{id}`, for OpenAI's clients and Anthropic's, and the model
of a request that names none."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from fastapi import Request, Response

from mlx_server.api.accumulator import Wire
from mlx_server.api.fields import ignored_header
from mlx_server.api.files import rfc3339
from mlx_server.api.handlers import json_response
from mlx_server.errors import AdapterNotFound, ModelNotFound, served_names
from mlx_server.http.errors import is_anthropic
from mlx_server.http.security import keyed_router
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import Capabilities, Task

ABILITIES = ("reasoning", "tools", "structured_output", "fill_in_the_middle")

TYPES: Mapping[Task, str] = {"generate": "llm", "embed": "embeddings", "rerank": "rerank"}

GENERATION_PARAMS = (
    *("max_tokens", "stop", "seed", "logit_bias", "logprobs", "top_logprobs"),
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
TASK_PARAMS: Mapping[Task, tuple[str, ...]] = {
    "generate": GENERATION_PARAMS,
    "embed": ("encoding_format", "dimensions", "prompt_name", "truncate"),
    "rerank": ("top_n", "return_documents", "instruction"),
}
ABILITY_PARAMS: Mapping[str, tuple[str, ...]] = {
    "reasoning": ("reasoning", "reasoning_effort"),
    "tools": ("tools", "tool_choice", "parallel_tool_calls"),
    "structured_output": ("response_format", "structured_outputs"),
}
"""Parameters of chat completions that need an ability of the model."""


def described(capabilities: Capabilities | None) -> Wire:
    """Each is null while the model's files are not on this machine."""
    known = asdict(capabilities) if capabilities else {}
    context = known.get("context_length")
    return {
        "family": known.get("family"),
        "context_length": context,
        "capabilities": {name: known.get(name) for name in ABILITIES},
        # vLLM's
        "max_model_len": context,
        # LM Studio's
        "type": TYPES[capabilities.task] if capabilities else "llm",
        "arch": known.get("architecture"),
        "compatibility_type": "mlx",
        "quantization": known.get("quantization"),
        "size_bytes": known.get("size_bytes"),
        "unused_prediction_layers": known.get("unused_heads"),
        "max_context_length": context,
        # OpenRouter's
        "architecture": {**_modalities(capabilities), "tokenizer": known.get("architecture")},
        "supported_parameters": list(_parameters(capabilities)) if capabilities else None,
    }


def model_info(model: Wire, context: int | None) -> Wire:
    """A model of OpenAI's list in Anthropic's form. `context`: None before it is known."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": rfc3339(model["created"]),
        "lifecycle": "active",
        "max_input_tokens": context and context - 1,
        "max_tokens": context and context - 1,
    }


def _modalities(capabilities: Capabilities | None) -> Wire:
    type = TYPES[capabilities.task] if capabilities else "llm"
    output = "text" if type == "llm" else type
    inputs = ["text", "image"] if capabilities and capabilities.sees else ["text"]
    return {
        "modality": f"{'+'.join(inputs)}->{output}",
        "input_modalities": inputs,
        "output_modalities": [output],
    }


def _parameters(capabilities: Capabilities) -> Iterator[str]:
    unread = {"instruction"} if capabilities.is_encoder else set()
    yield from (name for name in TASK_PARAMS[capabilities.task] if name not in unread)
    if capabilities.task != "generate":
        return
    for ability, names in ABILITY_PARAMS.items():
        if getattr(capabilities, ability):
            yield from names


router = keyed_router()


PAGING = ("limit", "after_id", "before_id")
"""What Anthropic's clients may ask of a list: it is always whole."""


@router.get("/v1/models")
async def models(http: Request) -> Response:
    pool: Pool = http.app.state.pool
    if is_anthropic(http.scope):
        infos = [
            model_info(model, pool.models[spec.id].context_length)
            for spec in pool.models.specs
            for model in await _with_adapters(http, pool, spec.id)
        ]
        paging = [name for name in PAGING if name in http.query_params]
        first, last = (infos[0]["id"], infos[-1]["id"]) if infos else (None, None)
        page = {"data": infos, "first_id": first, "last_id": last, "has_more": False}
        return json_response(page, ignored_header(paging))
    ids = pool.models.ids
    listed = [model for id in ids for model in await _with_adapters(http, pool, id)]
    # Codex wants a catalog of its own; from an empty one it goes on with what it knows of models
    catalog: Wire = {"models": []} if "client_version" in http.query_params else {}
    return json_response({"object": "list", "data": listed, **catalog})


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> Response:
    pool: Pool = http.app.state.pool
    id, adapter = await served(pool, name)
    listed = await _model(http, pool, id)
    listed = _adapter_model(listed, adapter) if adapter else listed
    if is_anthropic(http.scope):
        return json_response(model_info(listed, pool.models[id].context_length))
    return json_response(listed)


async def served(pool: Pool, name: str) -> tuple[str, str | None]:
    """The id of the model with this name, and its adapter. Raises ModelNotFound or
    AdapterNotFound."""
    base, adapter = pool.models.split(name)
    id = pool.models.spec(base).id
    if adapter and adapter not in (names := await pool.adapter_names(id)):
        sentence = f"{id} has no adapter {adapter[:100]!r}. {served_names(adapter, names)}"
        raise AdapterNotFound(sentence, param="model")
    return id, adapter


async def _with_adapters(http: Request, pool: Pool, id: str) -> list[Wire]:
    base = await _model(http, pool, id)
    return [base, *(_adapter_model(base, adapter) for adapter in base["adapters"])]


def _adapter_model(base: Wire, adapter: str) -> Wire:
    return {**base, "id": f"{base['id']}:{adapter}", "parent": base["id"]}


async def _model(http: Request, pool: Pool, id: str) -> Wire:
    is_loaded = any(model.prepared.id == id for model in pool.models.loaded)
    return {
        "id": id,
        "object": "model",
        "created": http.app.state.started,
        "owned_by": "mlx-server",
        "batching": pool.models[id].batching,
        "state": "loaded" if is_loaded else "not-loaded",  # LM Studio's words
        "adapters": await pool.adapter_names(id),
        **described(await pool.capabilities(id)),
    }


async def model_or_default(pool: Pool, requested: str | None) -> str:
    """The requested model, or the first of models.yaml that generates text."""
    if requested:
        return requested
    for spec in pool.models.specs:
        if spec.upstream or (await pool.prepared(spec.id)).task == "generate":
            return spec.id
    raise ModelNotFound("No model is listed in models.yaml that generates text.", param="model")
