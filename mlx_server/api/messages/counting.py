"""Counts the tokens of a prompt without answering it."""

from mlx_server.api.messages.errors import prompt_too_long
from mlx_server.errors import ContextTooLong
from mlx_server.generation.plan import count_prompt
from mlx_server.pool.pool import Pool
from mlx_server.prompts.text_size import characters_of
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest


async def count(pool: Pool, request: GenerateRequest) -> int:
    name, _ = pool.named(request.model)
    prepared = await pool.prepared(name)
    return await in_thread(count_prompt, prepared, request, model=prepared.id)


async def overflow(pool: Pool, request: GenerateRequest) -> ContextTooLong:
    """The error for a prompt that exceeds the context, with its exact number of tokens. Of a text
    that is too long to be tokenised, it has the fewest tokens that there can be."""
    name, _ = pool.named(request.model)
    prepared = await pool.prepared(name)
    try:
        tokens = await count(pool, request)
    except ContextTooLong:
        fewest = characters_of(request) // prepared.checkpoint.tokenizer.longest
        tokens = max(prepared.context_length, fewest)
    return prompt_too_long(tokens, prepared.context_length - 1)
