"""vLLM's routes that load and unload adapters while the server runs."""

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api.body import documented, read
from mlx_server.api.fields import WireModel, ignored_header
from mlx_server.api.handlers import json_response
from mlx_server.errors import BadRequest
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import REPLAY

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

Name = Annotated[str, Field(min_length=1)]
Path = Annotated[str, Field(min_length=1, max_length=limits.ADAPTER_PATH_CHARACTERS)]
"""The limit is the longest path that systems allow: looking up a path takes time quadratic in its
length."""

router = APIRouter()


class Unload(WireModel):
    lora_name: Name
    model: Name | None = None
    """May be left out if only one model with weights is served."""


class Load(Unload):
    lora_path: Path


@router.post(LOAD, openapi_extra=documented(LOAD, Load))
async def load(http: Request) -> Response:
    body = await read(http, Load)
    pool: Pool = http.app.state.pool
    id = _model(pool, body)
    spec = await pool.add_adapter(id, body.lora_name, body.lora_path)
    loaded = {"id": f"{id}:{spec.name}", "parent": id, "digest": spec.digest}
    return json_response(loaded, ignored_header(body.ignored()))


@router.post(UNLOAD, openapi_extra=documented(UNLOAD, Unload))
async def unload(http: Request) -> Response:
    body = await read(http, Unload)
    pool: Pool = http.app.state.pool
    id = _model(pool, body)
    await pool.remove_adapter(id, body.lora_name)
    unloaded = {"id": f"{id}:{body.lora_name}", "parent": id, "unloaded": True}
    return json_response(unloaded, ignored_header(body.ignored()))


def _model(pool: Pool, body: Unload) -> str:
    if body.model:
        return pool.models.spec(body.model).id
    served = [
        entry.spec.id for entry in pool.models.local if not entry.spec.source.startswith(REPLAY)
    ]
    if len(served) != 1:
        raise BadRequest(
            f"Set `model` to the model that the adapter is for: {', '.join(served) or 'none'}.",
            param="model",
        )
    return served[0]
