"""Counts the tokens of a prompt without answering it."""

from mlx_server.generation.plan import count_prompt
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest


async def count(pool: Pool, request: GenerateRequest) -> int:
    name, _ = pool.named(request.model)
    prepared = await pool.prepared(name)
    return await in_thread(count_prompt, prepared, request, model=prepared.id)
