from fastapi import APIRouter, Request, Response

from mlx_server.api.body import documented, read
from mlx_server.api.client_disconnect import while_connected
from mlx_server.api.embeddings.input import to_request
from mlx_server.api.embeddings.output import listed, numbers, written_as_base64
from mlx_server.api.embeddings.protocol import EmbeddingsBody
from mlx_server.api.fields import ignored_header
from mlx_server.api.handlers import json_response
from mlx_server.api.metrics import Metrics
from mlx_server.generation.embeddings import Embeddings, EmbedRequest, embed
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread

PATH = "/v1/embeddings"

router = APIRouter()


@router.post(PATH, openapi_extra=documented(PATH, EmbeddingsBody))
async def embeddings(http: Request) -> Response:
    body = await read(http, EmbeddingsBody)
    found = await embedded(http, to_request(body, http.state.client))
    write = written_as_base64 if body.encoding_format == "base64" else numbers
    made = await in_thread(listed, found, body.model, write)
    return json_response(made, ignored_header(await in_thread(body.ignored)))


async def embedded(http: Request, request: EmbedRequest) -> Embeddings:
    """The embeddings, unless the client leaves before."""
    pool: Pool = http.app.state.pool
    metrics: Metrics = http.app.state.metrics
    return await while_connected(
        http, metrics.answers.counted(embed(request, pool), request.client)
    )
