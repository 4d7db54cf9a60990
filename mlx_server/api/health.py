"""`GET /health`: whether the engine is alive. It is the only route that needs no key."""

from fastapi import APIRouter, Request, Response

from mlx_server.api.handlers import json_response
from mlx_server.pool.pool import Pool

router = APIRouter()


@router.get("/health")
async def health(http: Request) -> Response:
    pool: Pool = http.app.state.pool
    if pool.healthy:
        return json_response({"status": "ok"})
    response = json_response({"status": "engine_died"})
    response.status_code = 503
    return response
