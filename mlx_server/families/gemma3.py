"""Gemma up to 3n: plain-text answers. Its templates do not support tools."""

from mlx_server.families.base import ModelFamily

GEMMA3 = ModelFamily(
    name="gemma3",
    model_types=("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n"),
    stop_tokens=("<end_of_turn>", "<eos>"),
    special_tokens=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
)
