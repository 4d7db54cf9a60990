from fastapi import APIRouter, Request, Response

from mlx_server.api.body import documented, read
from mlx_server.api.completions.input import to_request
from mlx_server.api.completions.output import CompletionOutput
from mlx_server.api.completions.protocol import CompletionBody
from mlx_server.api.handlers import respond
from mlx_server.api.overflow import prompt_too_long
from mlx_server.request_threads import in_thread

PATH = "/v1/completions"

router = APIRouter()


@router.post(PATH, openapi_extra=documented(PATH, CompletionBody))
async def completions(http: Request) -> Response:
    body = await read(http, CompletionBody)
    request = to_request(body)
    output = CompletionOutput(
        model=body.model,
        prompts=len(request.prompts),
        n=request.n,
        logprobs=request.logprobs is not None,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        token_ids=bool(body.return_token_ids),
        timings=bool(body.timings_per_token),
    )
    ignored = await in_thread(body.ignored)
    return await respond(
        http,
        request,
        output,
        stream=bool(body.stream),
        ignored=ignored,
        overflow=prompt_too_long,
    )
