"""Lets the idle engine compute the beginning of a conversation's next prompt."""

from mlx_server.engine.messages import ComputeAhead, Generate
from mlx_server.events import Answer
from mlx_server.generation.rendering import chat_prompt
from mlx_server.messages import Conversation, Message
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel
from mlx_server.prompts.next_prompt import next_beginning
from mlx_server.requests import GenerateRequest


def compute_ahead(
    pool: Pool,
    prepared: PreparedModel,
    request: GenerateRequest,
    row: Generate,
    answer: Answer,
) -> None:
    """Lets the engine compute the next prompt, if the request has one complete answer in a
    conversation and models.yaml sets `compute_ahead`.

    row: the request's first row, whose adapter and cache scope the next prompt will have.
    """
    is_one = len(request.prompts) == request.n == 1
    is_whole = answer.finish_reason not in (None, "length")
    if not (is_one and is_whole and prepared.spec.compute_ahead):
        return
    (conversation,) = request.prompts
    if isinstance(conversation, Conversation) and prepared.transcript is None:
        message = answer.message()
        pool.compute_ahead(prepared, lambda: _command(prepared, conversation, message, row))


def _command(
    prepared: PreparedModel, conversation: Conversation, answer: Message, row: Generate
) -> ComputeAhead:
    return ComputeAhead(
        row.model,
        next_beginning(conversation, answer, lambda each: chat_prompt(prepared, each).tokens),
        prepared.spec.compute_ahead,
        adapter=row.adapter,
        adapter_scale=row.adapter_scale,
        cache_scope=row.cache_scope,
        on_disk=row.on_disk,
    )
