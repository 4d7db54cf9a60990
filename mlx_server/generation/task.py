"""Prepares the model for a task, and refuses a request for a task that the model does not have."""

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
    """The model for embeddings or ranks. Raises BadRequest if it has another task, or if its name
    includes an adapter, which these tasks can't use."""
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
    """Raises BadRequest if the model has another task, for example for embeddings of a chat model.
    vLLM does so too."""
    if prepared.task != wanted:
        raise BadRequest(
            f"{prepared.id} {ROUTES[prepared.task]}. Its owner can change that: `task: {wanted}` "
            "in models.yaml.",
            param="model",
        )
