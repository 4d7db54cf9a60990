"""Finds models for what they do, and refuses requests for what they do not."""

from collections.abc import Mapping

from mlx_server.errors import BadRequest
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel, Task
from mlx_server.system.logs import log_model

ROUTES: Mapping[Task, str] = {
    "generate": "generates text: use /v1/chat/completions",
    "embed": "computes embeddings: use /v1/embeddings",
    "rerank": "ranks documents: use /v1/rerank",
}


async def prepared_for(task: Task, model: str, pool: Pool) -> PreparedModel:
    """The model for a task that adapters have no part in. Raises BadRequest."""
    name, adapter = pool.named(model)
    prepared = await pool.prepared(name)
    log_model(prepared.id, prepared.family.name)
    check_task(prepared, task)
    if adapter:
        raise BadRequest(
            f"Embeddings and ranks are computed without adapters. Name the model alone: "
            f"{prepared.id}.",
            param="model",
        )
    return prepared


def check_task(prepared: PreparedModel, wanted: Task) -> None:
    """Raises BadRequest, as vLLM does, for example if a chat model is asked for embeddings."""
    if prepared.task != wanted:
        raise BadRequest(
            f"{prepared.id} {ROUTES[prepared.task]}. Its owner can change that: `task: {wanted}` "
            "in models.yaml.",
            param="model",
        )
