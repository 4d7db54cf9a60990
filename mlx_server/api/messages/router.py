from fastapi import APIRouter, Request, Response

from mlx_server.api.body import documented, read
from mlx_server.api.fields import ignored_header
from mlx_server.api.handlers import json_response, respond
from mlx_server.api.messages.counting import count
from mlx_server.api.messages.errors import PATH, prompt_too_long
from mlx_server.api.messages.input import to_request
from mlx_server.api.messages.output import MessagesOutput, OutputOptions
from mlx_server.api.messages.protocol import MessagesBody, PromptBody
from mlx_server.api.messages.stream import frames
from mlx_server.api.security import signer_of
from mlx_server.engine.messages import SHORTEST_STORED
from mlx_server.messages import media_places
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread

COUNT_PATH = f"{PATH}/count_tokens"

router = APIRouter()


@router.post(PATH, openapi_extra=documented(PATH, MessagesBody))
async def messages(http: Request) -> Response:
    body = await read(http, MessagesBody)
    pool: Pool = http.app.state.pool
    signer = signer_of(http)
    parsed = await in_thread(to_request, body, signer)
    options = OutputOptions(
        is_empty=body.max_tokens == 0,
        summarizes=body.compaction is not None,
        omits_thoughts=bool(body.thinking and body.thinking.display == "omitted"),
        stores_prompt=parsed.stores_prompt and pool.keeps_prompts,
        shortest_stored=SHORTEST_STORED,
    )
    output = MessagesOutput(model=body.model, signer=signer, options=options)
    return await respond(
        http,
        parsed.request,
        output,
        stream=bool(body.stream),
        ignored=list(parsed.ignored),
        frames=frames(http.scope),
        overflow=prompt_too_long,
    )


@router.post(COUNT_PATH, openapi_extra=documented(COUNT_PATH, PromptBody))
async def count_tokens(http: Request) -> Response:
    body = await read(http, PromptBody)
    parsed = await in_thread(to_request, body, signer_of(http))
    tokens = await count(http.app.state.pool, parsed.request)
    ignored = dict.fromkeys((*parsed.ignored, *media_places(parsed.request.prompts)))
    return json_response({"input_tokens": tokens}, ignored_header(ignored))
