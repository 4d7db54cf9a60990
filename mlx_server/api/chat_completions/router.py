from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from mlx_server.api.body import documented, read
from mlx_server.api.chat_completions.input import echoed, to_request
from mlx_server.api.chat_completions.output import (
    REASONING_FIELDS,
    ChatOutput,
    FunctionCallOutput,
    Wire,
)
from mlx_server.api.chat_completions.protocol import ChatBody
from mlx_server.api.chat_completions.rendering import Rendering, prompt_only, rendered
from mlx_server.api.chat_completions.stored import StoringOutput, filter_of, with_metadata
from mlx_server.api.conversations import UpdateBody
from mlx_server.api.fields import ignored_header
from mlx_server.api.handlers import json_response, respond
from mlx_server.api.responses.pagination import After, Limit, Sorted
from mlx_server.api.responses.state import page_body
from mlx_server.errors import Forbidden
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread
from mlx_server.store import Store

PATH = "/v1/chat/completions"
ONE = PATH + "/{id}"
RENDER = PATH + "/render"
TEMPLATE = "/apply-template"

router = APIRouter()


@router.post(PATH, openapi_extra=documented(PATH, ChatBody))
async def chat_completions(http: Request) -> Response:
    body = await read(http, ChatBody)
    request = await in_thread(to_request, body)
    made = (FunctionCallOutput if body.is_legacy else ChatOutput)(
        model=body.model,
        n=request.n,
        logprobs=request.logprobs is not None,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        token_ids=bool(body.return_token_ids),
        timings=bool(body.timings_per_token),
        freeform=body.freeform_names,
        echoed=echoed(body, request),
        reasoning_fields=() if body.hides_reasoning else _reasoning_fields(http),
    )
    ignored = await in_thread(body.ignored)
    output = await _storing(http, body, made) if body.store else made
    return await respond(http, request, output, stream=bool(body.stream), ignored=ignored)


async def _storing(http: Request, body: ChatBody, output: ChatOutput) -> StoringOutput:
    """Raises ServerError before anything is generated if it could not be stored."""
    store, owner = _store(http), http.state.owner
    storing = await in_thread(StoringOutput, output, body, store, owner)
    await store.check_room(owner)
    return storing


@router.post(RENDER, openapi_extra=documented(RENDER, ChatBody))
async def render(http: Request) -> Response:
    return await _rendered(http, rendered)


@router.post(TEMPLATE, openapi_extra=documented(TEMPLATE, ChatBody))
async def apply_template(http: Request) -> Response:
    return await _rendered(http, prompt_only)


async def _rendered(http: Request, render: Rendering) -> Response:
    if not http.app.state.show_prompts:
        raise Forbidden(
            "This route shows the prompt that the chat template makes of a request. The server's "
            "owner can allow that: `show_prompts: true` under `server` in models.yaml."
        )
    body = await read(http, ChatBody)
    request = await in_thread(to_request, body)
    pool: Pool = http.app.state.pool
    name, _ = pool.named(body.model)
    prepared = await pool.prepared(name)
    made, unread = await in_thread(render, prepared, request, model=prepared.id)
    ignored = await in_thread(body.ignored)
    return json_response(made, ignored_header([*ignored, *unread]))


@router.get(PATH)
async def stored(
    http: Request, after: After = None, limit: Limit = 20, order: Sorted = "asc"
) -> Response:
    wanted, owner = filter_of(http), http.state.owner
    page = await _store(http).completions(owner, wanted, after, limit, order)
    return json_response(page_body(page.items, has_more=page.has_more))


@router.get(ONE)
async def retrieve(http: Request, id: str) -> Response:
    found = await _store(http).completion(id, http.state.owner)
    return json_response(msgspec.Raw(found.body))


@router.post(ONE, openapi_extra=documented(ONE, UpdateBody))
async def update(http: Request, id: str) -> Response:
    body = await read(http, UpdateBody)
    store, owner = _store(http), http.state.owner
    found = await store.completion(id, owner)
    completion = msgspec.json.decode(found.body, type=Wire)
    updated = with_metadata(completion, body.metadata or {}, found.created_at)
    await store.update_completion(updated, owner)
    return json_response(msgspec.Raw(updated.body), ignored_header(body.ignored()))


@router.delete(ONE)
async def delete(http: Request, id: str) -> Response:
    await _store(http).delete_completion(id, http.state.owner)
    return json_response({"object": "chat.completion.deleted", "id": id, "deleted": True})


@router.get(ONE + "/messages")
async def messages(
    http: Request, id: str, after: After = None, limit: Limit = 20, order: Sorted = "asc"
) -> Response:
    owner = http.state.owner
    page = await _store(http).completion_messages(id, owner, after, limit, order)
    return json_response(page_body(page.items, has_more=page.has_more))


def _reasoning_fields(http: Request) -> Sequence[str]:
    return REASONING_FIELDS[http.app.state.reasoning_field]


def _store(http: Request) -> Store:
    found: Store = http.app.state.runs.store
    return found
