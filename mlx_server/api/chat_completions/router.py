from fastapi import APIRouter, Request, Response

from mlx_server.api.body import documented, read
from mlx_server.api.chat_completions.input import to_request
from mlx_server.api.chat_completions.output import ChatOutput, FunctionCallOutput
from mlx_server.api.chat_completions.protocol import ChatBody
from mlx_server.api.handlers import respond
from mlx_server.request_threads import in_thread

PATH = "/v1/chat/completions"

router = APIRouter()


@router.post(PATH, openapi_extra=documented(PATH, ChatBody))
async def chat_completions(http: Request) -> Response:
    body = await read(http, ChatBody)
    request = await in_thread(to_request, body)
    output = (FunctionCallOutput if body.is_legacy else ChatOutput)(
        model=body.model,
        n=request.n,
        logprobs=request.logprobs is not None,
        include_usage=body.include_usage,
        freeform=body.freeform_names,
    )
    ignored = body.ignored()
    return await respond(http, request, output, stream=bool(body.stream), ignored=ignored)
