"""`GET /v1/models` and `GET /v1/models/{id}`."""

from typing import Any

from fastapi import APIRouter, Request, Response

from mlx_server.api.answering import json_response
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec

router = APIRouter()


@router.get("/v1/models")
async def models(http: Request) -> Response:
    pool: Pool = http.app.state.pool
    return json_response({"object": "list", "data": [_model(http, s) for s in pool.specs]})


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> Response:
    pool: Pool = http.app.state.pool
    return json_response(_model(http, pool.spec(name)))


def _model(http: Request, spec: ModelSpec) -> dict[str, Any]:
    return {
        "id": spec.id,
        "object": "model",
        "created": http.app.state.started,
        "owned_by": "mlx-server",
    }
