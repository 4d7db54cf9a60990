"""The routes of `/v1/messages`."""

from functools import partial

from fastapi import Request, Response

from mlx_server.api.fields import ignored_header
from mlx_server.api.handlers import documented, json_response, read, respond
from mlx_server.api.messages.answer import PING, MessagesOutput, OutputOptions
from mlx_server.api.messages.input import MessagesBody, PromptBody, to_request
from mlx_server.engine.messages import SHORTEST_STORED
from mlx_server.generation.plan import count_prompt
from mlx_server.http.errors import MESSAGES_PATH, anthropic_error, anthropic_prompt_too_long
from mlx_server.http.resumable import resumed
from mlx_server.http.security import keyed_router, signer_of
from mlx_server.http.sse import Frames, event
from mlx_server.messages import media_places
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread, in_thread_if_large

COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"

router = keyed_router()
router.get(MESSAGES_PATH + "/{id}/stream")(resumed)


@router.post(MESSAGES_PATH, openapi_extra=documented(MESSAGES_PATH, MessagesBody))
async def create_message(http: Request) -> Response:
    body = await read(http, MessagesBody)
    pool: Pool = http.app.state.pool
    signer = signer_of(http)
    parsed = await in_thread_if_large(to_request, body, signer)
    options = OutputOptions(
        is_empty=body.max_tokens == 0,
        omits_thoughts=bool(body.thinking and body.thinking.display == "omitted"),
        stores_prompt=parsed.stores_prompt and pool.keeps_prompts,
        shortest_stored=SHORTEST_STORED,
    )
    output = MessagesOutput(model=body.model, signer=signer, options=options)
    error = partial(anthropic_error, scope=http.scope)
    return await respond(
        http,
        parsed.request,
        output,
        ignored=list(parsed.ignored),
        frames=Frames(keep_alive=lambda: event(PING), end=b"", error=error),
        overflow=anthropic_prompt_too_long,
    )


@router.post(COUNT_PATH, openapi_extra=documented(COUNT_PATH, PromptBody))
async def count_tokens(http: Request) -> Response:
    body = await read(http, PromptBody)
    parsed = await in_thread_if_large(to_request, body, signer_of(http))
    pool: Pool = http.app.state.pool
    name, _ = pool.models.split(body.model)
    prepared = await pool.prepared(name)
    tokens = await in_thread(count_prompt, prepared, parsed.request, model=prepared.id)
    unseen = media_places(parsed.request.prompts, prepared.takes)
    ignored = dict.fromkeys((*parsed.ignored, *unseen))
    return json_response({"input_tokens": tokens}, ignored_header(ignored))
