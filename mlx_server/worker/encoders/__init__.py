"""Encoders in MLX, under the names that their weights have in the checkpoints."""

from typing import Any

from mlx_server.checkpoints.encoders import architecture_of
from mlx_server.worker.encoders.base import Encoder
from mlx_server.worker.encoders.bert import Bert, BertArguments
from mlx_server.worker.encoders.modernbert import ModernBert, ModernBertArguments

__all__ = ["Encoder", "encoder_classes"]


def encoder_classes(config: dict[str, Any]) -> tuple[type[Encoder], type[Any]]:
    """Returns the classes of the model and of its arguments, as mlx-lm's loader expects them."""
    if architecture_of(config) == "modernbert":
        return ModernBert, ModernBertArguments
    return Bert, BertArguments
