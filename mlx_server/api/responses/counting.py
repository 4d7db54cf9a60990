"""`POST /v1/responses/input_tokens`: counts a request's prompt tokens without generating."""

from dataclasses import replace

from starlette.requests import Request

from mlx_server.api.responses.create import read_all
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.generation.plan import plan
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread


async def input_tokens(http: Request, body: ResponsesBody) -> tuple[int, tuple[str, ...]]:
    """The prompt tokens, without the tools of MCP servers, which are not contacted, and the names
    of what has no effect."""
    found = await read_all(http, body)
    pool: Pool = http.app.state.pool
    name, _ = pool.named(body.model)
    prepared = await pool.prepared(name)
    # without its transcript, a replay model does not advance to its next answer
    counted = replace(prepared, transcript=None)
    planned = await in_thread(plan, counted, found.parsed.request, model=name)
    return planned.prompt_tokens, (*found.parsed.ignored, *planned.ignored)
