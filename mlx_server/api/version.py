"""`GET /version`: the server's version, as vLLM tells its own."""

from fastapi import APIRouter, Response

from mlx_server import __version__
from mlx_server.api.handlers import json_response

router = APIRouter()


@router.get("/version")
async def version() -> Response:
    return json_response({"version": __version__})
