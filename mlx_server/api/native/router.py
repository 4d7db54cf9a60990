from fastapi import APIRouter, Request, Response

from mlx_server.api.body import documented, read
from mlx_server.api.client_disconnect import while_connected
from mlx_server.api.default_model import model_or_default
from mlx_server.api.handlers import respond_buffered
from mlx_server.api.native.input import to_request
from mlx_server.api.native.output import NativeOutput
from mlx_server.api.native.protocol import NativeBody
from mlx_server.families.base import ModelFamily
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread

PATH = "/generate"

router = APIRouter()


@router.post(PATH, openapi_extra=documented(PATH, NativeBody))
async def generate(http: Request) -> Response:
    body = await read(http, NativeBody)
    ignored = await in_thread(body.ignored)
    pool: Pool = http.app.state.pool
    model = await while_connected(http, model_or_default(pool, body.model))
    family = await while_connected(http, _family(pool, model))
    request = await in_thread(to_request, body, model, family)
    return await respond_buffered(http, request, NativeOutput(model=model), ignored=ignored)


async def _family(pool: Pool, model: str) -> ModelFamily:
    with pool.row_slot(1):
        return await pool.family(pool.named(model)[0])
