"""How many tokens a request would send to the model."""

from dataclasses import replace

from starlette.requests import Request

from mlx_server.api.responses.create import read_all
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.generation.plan import plan
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread


async def input_tokens(http: Request, body: ResponsesBody) -> int:
    """Those of MCP servers' tools aside, which are not asked for it."""
    found = await read_all(http, body)
    pool: Pool = http.app.state.pool
    name, _ = pool.named(body.model)
    prepared = await pool.prepared(name)
    silent = replace(prepared, transcript=None)  # or a replay model would be an answer further
    planned = await in_thread(plan, silent, found.parsed.request, model=name)
    return planned.prompt_tokens
