"""The model of a request that names none."""

from mlx_server.errors import ModelNotFound
from mlx_server.pool.pool import Pool


async def model_or_default(pool: Pool, requested: str | None) -> str:
    """The requested model, or the first of models.yaml that generates text."""
    if requested:
        return requested
    for spec in pool.models.specs:
        if spec.upstream or (await pool.prepared(spec.id)).task == "generate":
            return spec.id
    raise ModelNotFound("No model is listed in models.yaml that generates text.", param="model")
