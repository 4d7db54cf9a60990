"""`GET /v1/models` and `GET /v1/models/{id}`."""

from typing import Any

from fastapi import APIRouter, Request, Response

from mlx_server.api.handlers import json_response
from mlx_server.errors import AdapterNotFound
from mlx_server.pool.pool import Pool

router = APIRouter()


@router.get("/v1/models")
async def models(http: Request) -> Response:
    pool: Pool = http.app.state.pool
    found = [model for spec in pool.specs for model in await _with_adapters(http, pool, spec.id)]
    return json_response({"object": "list", "data": found})


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> Response:
    pool: Pool = http.app.state.pool
    base, adapter = pool.named(name)
    id = pool.spec(base).id
    if adapter and adapter not in await pool.adapter_names(id):
        raise AdapterNotFound(f"{id} has no adapter {adapter[:100]!r}.", param="model")
    found = _model(http, id, pool.batching(id))
    return json_response(_adapter_model(found, adapter) if adapter else found)


async def _with_adapters(http: Request, pool: Pool, id: str) -> list[dict[str, Any]]:
    adapters = await pool.adapter_names(id)
    base = _model(http, id, pool.batching(id))
    return [base, *(_adapter_model(base, adapter) for adapter in adapters)]


def _adapter_model(base: dict[str, Any], adapter: str) -> dict[str, Any]:
    return {**base, "id": f"{base['id']}:{adapter}", "parent": base["id"]}


def _model(http: Request, id: str, batching: bool | None) -> dict[str, Any]:
    return {
        "id": id,
        "object": "model",
        "created": http.app.state.started,
        "owned_by": "mlx-server",
        "batching": batching,
    }
