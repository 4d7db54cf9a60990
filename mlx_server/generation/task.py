"""Refuses requests for what a model does not do."""

from collections.abc import Mapping

from mlx_server.errors import BadRequest
from mlx_server.pool.prepare import PreparedModel, Task

ROUTES: Mapping[Task, str] = {
    "generate": "generates text: use /v1/chat/completions",
    "embed": "computes embeddings: use /v1/embeddings",
    "rerank": "ranks documents: use /v1/rerank",
}


def check_task(prepared: PreparedModel, wanted: Task) -> None:
    """Raises BadRequest, as vLLM does, for example if a chat model is asked for embeddings."""
    if prepared.task != wanted:
        raise BadRequest(
            f"{prepared.id} {ROUTES[prepared.task]}. Its owner can change that: `task: {wanted}` "
            "in models.yaml.",
            param="model",
        )
