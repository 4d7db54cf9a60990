from fastapi import APIRouter, Request, Response

from mlx_server.api.body import documented, read
from mlx_server.api.client_disconnect import while_connected
from mlx_server.api.fields import ignored_header
from mlx_server.api.handlers import json_response
from mlx_server.api.metrics import Metrics
from mlx_server.api.rerank.input import to_request
from mlx_server.api.rerank.output import ranked
from mlx_server.api.rerank.protocol import RerankBody
from mlx_server.generation.rerank import Relevance, RerankRequest, rerank
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread

PATH = "/v1/rerank"

router = APIRouter()


@router.post(PATH, openapi_extra=documented(PATH, RerankBody))
async def ranks(http: Request) -> Response:
    body = await read(http, RerankBody)
    request = to_request(body, http.state.client)
    found = await scored(http, request)
    made = await in_thread(ranked, found, request.documents, body)
    return json_response(made, ignored_header(await in_thread(body.ignored)))


async def scored(http: Request, request: RerankRequest) -> Relevance:
    """The scores of the documents, unless the client leaves before."""
    pool: Pool = http.app.state.pool
    metrics: Metrics = http.app.state.metrics
    return await while_connected(
        http, metrics.answers.counted(rerank(request, pool), request.client)
    )
