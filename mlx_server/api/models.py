"""`GET /v1/models` and `GET /v1/models/{id}`, for OpenAI's clients and Anthropic's."""

from typing import Any

from fastapi import APIRouter, Request, Response

from mlx_server.api.handlers import json_response
from mlx_server.api.messages.errors import is_anthropic
from mlx_server.api.messages.model_list import model_info, page
from mlx_server.api.model_facts import described
from mlx_server.errors import AdapterNotFound, served_names
from mlx_server.pool.pool import Pool

router = APIRouter()


@router.get("/v1/models")
async def models(http: Request) -> Response:
    pool: Pool = http.app.state.pool
    if is_anthropic(http.scope):
        infos = [
            model_info(model, pool.context_length(spec.id))
            for spec in pool.specs
            for model in await _with_adapters(http, pool, spec.id)
        ]
        return json_response(page(infos, http.query_params))
    found = [model for spec in pool.specs for model in await _with_adapters(http, pool, spec.id)]
    return json_response({"object": "list", "data": found})


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> Response:
    pool: Pool = http.app.state.pool
    base, adapter = pool.named(name)
    id = pool.spec(base).id
    if adapter and adapter not in (names := await pool.adapter_names(id)):
        sentence = f"{id} has no adapter {adapter[:100]!r}. {served_names(adapter, names)}"
        raise AdapterNotFound(sentence, param="model")
    found = await _model(http, pool, id)
    found = _adapter_model(pool, found, adapter) if adapter else found
    if is_anthropic(http.scope):
        return json_response(model_info(found, pool.context_length(id)))
    return json_response(found)


async def _with_adapters(http: Request, pool: Pool, id: str) -> list[dict[str, Any]]:
    adapters = await pool.adapter_names(id)
    base = await _model(http, pool, id)
    return [base, *(_adapter_model(pool, base, adapter) for adapter in adapters)]


def _adapter_model(pool: Pool, base: dict[str, Any], adapter: str) -> dict[str, Any]:
    listed = pool.spec(base["id"]).adapters.get(adapter)
    described = {"description": listed.description} if listed and listed.description else {}
    return {**base, "id": f"{base['id']}:{adapter}", "parent": base["id"], **described}


async def _model(http: Request, pool: Pool, id: str) -> dict[str, Any]:
    is_loaded = any(model.prepared.id == id for model in pool.loaded)
    return {
        "id": id,
        "object": "model",
        "created": http.app.state.started,
        "owned_by": "mlx-server",
        "batching": pool.batching(id),
        "state": "loaded" if is_loaded else "not-loaded",  # LM Studio's words
        "adapters": await pool.adapter_names(id),
        **described(await pool.capabilities(id)),
    }
