"""A local inference server for language models on Apple silicon (MLX)."""

__version__ = "0.1.0"
