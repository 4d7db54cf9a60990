"""`POST /v1/replay/reset`: replay models begin their transcripts again, as for a new test.

The route exists only where replay models are served.
"""

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field

from mlx_server.api.body import documented, read
from mlx_server.api.fields import WireModel, ignored_header
from mlx_server.api.handlers import json_response
from mlx_server.errors import BadRequest
from mlx_server.pool.pool import Pool

RESET = "/v1/replay/reset"

router = APIRouter()


class Reset(WireModel):
    model: Annotated[str, Field(min_length=1)] | None = None
    """All replay models by default."""


@router.post(RESET, openapi_extra=documented(RESET, Reset))
async def reset(http: Request) -> Response:
    body = await read(http, Reset)
    pool: Pool = http.app.state.pool
    models = [pool.models.spec(body.model).id] if body.model else pool.models.replays
    for id in models:
        if id not in pool.models.replays:
            raise BadRequest(
                f"{id} plays no transcript. Replay models here: {', '.join(pool.models.replays)}.",
                param="model",
            )
        pool.models.reset_replay(id)
    return json_response(
        {"object": "replay.reset", "models": models}, ignored_header(body.ignored())
    )
