"""`GET /health`, the only route that needs no key, and `GET /version`."""

from fastapi import APIRouter, Request, Response

from mlx_server import __version__
from mlx_server.api.handlers import json_response
from mlx_server.pool.pool import Pool

router = APIRouter()
keyed = APIRouter()


@router.get("/health")
async def health(http: Request) -> Response:
    """Whether the engine is alive."""
    pool: Pool = http.app.state.pool
    if pool.healthy:
        return json_response({"status": "ok"})
    response = json_response({"status": "engine_died"})
    response.status_code = 503
    return response


@keyed.get("/version")
async def version() -> Response:
    """The server's version, as vLLM reports its own."""
    return json_response({"version": __version__})
